"""The requirements of a wheel, one a line, without extras and without the packages named.

    requirements_of.py WHEEL NAME...

The CPU build of vLLM asks for torchvision, torchaudio and torchcodec, whose wheels are made for CUDA: none imports
beside a torch for CPUs, and torchvision's presence breaks transformers. Text models need none of them.
"""

import re
import sys
import zipfile
from email.parser import HeaderParser


def main(wheel: str, *without: str) -> None:
    """Print them."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(name).decode())
    for requirement in headers.get_all("Requires-Dist", []):
        package = re.match(r"[\w.-]+", requirement)
        assert package is not None, requirement
        if "extra ==" not in requirement and package.group().lower() not in without:
            print(requirement)


if __name__ == "__main__":
    main(*sys.argv[1:])

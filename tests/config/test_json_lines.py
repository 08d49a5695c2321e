"""Lines of JSON."""

from __future__ import annotations

import json

from groupwise.config.json_lines import json_lines


def test_only_a_line_feed_ends_a_line_and_blank_ones_are_none() -> None:
    rows = ["a\u2028b", "c\u0085d", "e\u2029\x1cf"]
    text = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\r\n"
    assert [(number, json.loads(line)) for number, line in json_lines(text)] == [*zip((1, 3, 5), rows, strict=True)]

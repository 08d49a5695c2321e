"""Bridges to other systems: their files, flags, classes and wires, a folder each. Entry points make them known."""

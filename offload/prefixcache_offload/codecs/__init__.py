"""Codecs: other, smaller forms of a block's bytes. Bytes and shapes only; who asks for which form callers say.

`lossless` is for bytes at rest on disk and gives back every bit. `names`, `formats` and the rest are the forms that a
namespace may ask for: they lose a little, are made by the worker before the copy, and every tier holds more tokens.
"""

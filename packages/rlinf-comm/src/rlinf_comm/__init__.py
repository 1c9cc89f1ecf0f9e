"""Adaptive communication of RLinf. Here so far: the codec that every transport shares."""

from rlinf_comm.codec import CodecError, decode, encode

__all__ = ["CodecError", "decode", "encode"]

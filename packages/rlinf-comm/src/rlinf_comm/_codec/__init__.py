"""The parts of ``rlinf_comm.codec``; import that module."""

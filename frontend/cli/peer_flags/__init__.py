"""The flags of other servers that are not options of Engine, so that their command lines work here.

`accepted` has the flags without effect, `translated` those that stand for options of Engine, and `instead` those that
need another command line.
"""

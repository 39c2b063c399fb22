"""Python environments as simulators on the link: the other end of `corral.make_vec("tcp://...")`."""

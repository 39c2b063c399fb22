"""The protocol CLP/1 of external simulators (docs/link.md), and the learner's end of it."""

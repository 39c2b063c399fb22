"""The link to external simulators: the protocol CLP/1 (docs/link.md), its bindings, and the learner's sessions."""

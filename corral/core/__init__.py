"""What everything else stands on: types, spaces, seeds, errors, bytes. No torch, no process, no socket."""

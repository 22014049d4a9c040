//! What the events add up to: the allocators' state, replayed.

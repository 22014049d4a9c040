//! Maps and sets whose hash function has no random keys: getting those is a system call, which a program may forbid.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, DefaultHasher};

pub(super) type Map<K, V> = HashMap<K, V, BuildHasherDefault<DefaultHasher>>;
pub(super) type Set<T> = HashSet<T, BuildHasherDefault<DefaultHasher>>;

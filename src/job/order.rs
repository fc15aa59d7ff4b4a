//! The order of execution: from what reads what, deterministically.

//! The two-level memory of a framework on a GPU: its caching allocator over the device's own.
//!
//! For: answering a sequence of [`Request`](super::requests::Request)s as `PyTorch`'s allocator would, to the byte.
//! Not for: reading sequences from files, nor plans' arena addresses.

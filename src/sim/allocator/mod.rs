//! The two-level memory of a framework on a GPU: its caching allocator over the device's own.
//!
//! It answers a sequence of [`Request`](super::requests::Request)s as `PyTorch`'s allocator would,
//! to the byte.

mod config;
mod core;
mod device;
mod free;
mod pytorch;
pub mod replay;
mod stats;

pub use self::config::{Config, ConfigError};
pub use self::core::{BlockHandle, Core, OutOfMemory, Rules, Step, Want};
pub use self::device::{Device, GRANULE};
pub use self::pytorch::{Allocator, PyTorch};
pub use self::stats::{BlockView, Change, SegmentChange, SegmentView, State, Stats};

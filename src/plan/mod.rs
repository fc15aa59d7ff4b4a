//! How plans are found.
//!
//! Not for: flags or files.

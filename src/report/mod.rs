//! What people read: tables, curves, timelines.

pub mod schemas;

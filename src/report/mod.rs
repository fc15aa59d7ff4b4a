//! What people read: tables, curves, timelines.

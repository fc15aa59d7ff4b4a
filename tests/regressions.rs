//! What use showed to be wrong, a file for each group.

mod outputs;
mod plans;
mod words;

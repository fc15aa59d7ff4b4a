//! What use showed to be wrong, a file for each group.

mod outputs;
mod words;

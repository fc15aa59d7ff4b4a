//! All tests that go through the library's public face or the command line, in one binary, so that
//! they link once. `fuzz_pickle` and `fuzz_trace` count memory and stand alone.

mod allocator;
mod arranged;
mod bad_input;
mod bounds;
mod check;
mod cli;
mod common;
mod dropout;
#[cfg(target_os = "linux")]
mod dry;
mod estimate;
mod fuzz;
mod interpreter;
#[cfg(feature = "cuda")]
mod numbers;
mod overlap;
mod place;
mod planning;
mod regressions;
mod resolutions;
mod schemas;
mod share;
mod together;

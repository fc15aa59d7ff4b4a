//! A CUDA device that owns memory and computes nothing.
//!
//! Preloaded under an unmodified PyTorch, it lets the real dispatcher, autograd, optimizers and
//! caching allocator run on a machine without a GPU. Every allocation is PyTorch's own, and every
//! launch of a kernel that the installed files have for the device succeeds without doing anything,
//! so a job's memory is exact; its results and its speed are not.
//!
//! This library holds the functions that must answer something. Every other function that the
//! installed NVIDIA libraries export is a stub that counts its calls and returns 0; `neap dry`
//! generates those at run time.
//!
//! Copies of at most [`memory::BACKED`] bytes are real, so that what a script sends to the device
//! it can read back. Larger copies only cost address space. What follows from such bytes by small
//! operators, `neap.dry` computes on the host and notes here.
#![allow(non_snake_case)]
#![cfg(target_os = "linux")]

mod config;
mod cubin;
mod device;
mod driver;
mod fatbin;
mod frames;
mod graph;
mod ipc;
mod kernels;
mod launch;
mod library;
mod log;
mod lz4;
mod memory;
mod nccl;
mod nvml;
mod occupancy;
mod properties;
mod python;
mod ranges;
mod read;
mod reduce;
mod rnn;
mod solver;
mod state;
mod stream;
mod sys;
mod together;
mod transfer;
mod virtual_memory;
mod watch;
mod zstd;

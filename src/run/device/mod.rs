//! Devices that can run a job: the embedded host, and CUDA where there is a GPU.

pub mod host;

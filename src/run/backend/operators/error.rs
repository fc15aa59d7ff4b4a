//! Why an operator can't be carried out.

/// Why an operator can't be carried out, in one sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// The operator's arguments, shapes and outputs contradict each other.
    #[error("{0}")]
    Invalid(String),
    /// A form of the operator, or an element type, that the device does not have.
    #[error("{0}")]
    Unsupported(String),
    /// Numbers in the data, such as an index beyond the table that it looks up in.
    #[error("{0}")]
    Data(String),
    /// The device failed, or a library that it uses.
    #[error("{0}")]
    Device(String),
}

impl From<&str> for KernelError {
    fn from(problem: &str) -> Self {
        Self::Invalid(problem.to_owned())
    }
}

/// A [`KernelError::Invalid`] by a format string.
macro_rules! invalid {
    ($($text:tt)*) => { $crate::backend::operators::KernelError::Invalid(format!($($text)*)) };
}

/// A [`KernelError::Unsupported`] by a format string.
macro_rules! unsupported {
    ($($text:tt)*) => { $crate::backend::operators::KernelError::Unsupported(format!($($text)*)) };
}

/// A [`KernelError::Data`] by a format string.
macro_rules! data_error {
    ($($text:tt)*) => { $crate::backend::operators::KernelError::Data(format!($($text)*)) };
}

/// A [`KernelError::Device`] by a format string.
#[cfg(feature = "cuda")]
macro_rules! device_error {
    ($($text:tt)*) => { $crate::backend::operators::KernelError::Device(format!($($text)*)) };
}

pub(in crate::backend) use {data_error, invalid, unsupported};

#[cfg(feature = "cuda")]
pub(in crate::backend) use device_error;

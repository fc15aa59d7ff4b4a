//! The job: one training or inference iteration, repeated.
//!
//! This is the graph (tensors, operators, phases), its file form, importers of recorded traces, and
//! what follows from the graph alone: order, liveness, floor.

pub mod arrange;
mod build;
pub mod chakra;
mod form;
pub mod graph;
pub mod json;
pub mod liveness;
mod lower;
pub mod optimizer;
pub mod order;

pub use arrange::{Arrangement, Moved, Origin, Pieces, arrange};
pub use graph::{Arg, Dtype, Graph, GraphError, Operand, Operator, Phase, Replay, Role, Tensor};
pub use optimizer::{Group, Optimizer};

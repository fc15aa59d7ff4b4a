//! The reasons to refuse a plan, each one clear sentence.

/// One reason to refuse a plan. Event numbers count from 0 in the plan's list; offsets are bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the sentences say what the fields are")]
pub enum Refusal {
    #[error(
        "the plan is for {jobs} jobs and {graphs} graphs were given; a plan has at least one job, and each its graph"
    )]
    Jobs { jobs: usize, graphs: usize },
    #[error("{job}: {reason}")]
    Job { job: String, reason: Box<Refusal> },
    #[error(
        "{first} and {second} both use byte {offset} of {memory}; every job has bytes of its own"
    )]
    JobsOverlap { first: String, second: String, memory: &'static str, offset: u64 },
    #[error("the plan's device is impossible: {0}")]
    Device(String),
    #[error(
        "the budget is {budget} bytes, but the device has {available} bytes beside its reserve"
    )]
    BudgetBeyondDevice { budget: u64, available: u64 },
    #[error("the plan has {latencies} latencies for {operators} operators; each operator has one")]
    Latencies { latencies: usize, operators: usize },
    #[error("`order` and `pieces`: {0}")]
    Arrangement(String),
    #[error("the latency of operator `{operator}` is zero; it must be at least 1 ns")]
    LatencyZero { operator: String },
    #[error("event {event} refers to operator {id}, but the graph has {operators} operators")]
    UnknownOperator { event: usize, id: u32, operators: usize },
    #[error("{place} refers to tensor {id}, but the graph has {tensors} tensors")]
    UnknownTensor { place: String, id: u32, tensors: usize },
    #[error(
        "event {event} is due earlier than the event before it; events stand in nondecreasing order of the operator they follow"
    )]
    Unsorted { event: usize },
    #[error("event {event} recomputes operator `{operator}` before it has run")]
    RecomputeTooEarly { event: usize, operator: String },
    #[error("event {event} recomputes operator `{operator}`, which must never run again")]
    NeverReplayed { event: usize, operator: String },
    #[error(
        "event {event} recomputes operator `{operator}`, which would update `{tensor}` a second time"
    )]
    UpdatesTwice { event: usize, operator: String, tensor: String },
    #[error(
        "event {event} keeps `{tensor}` from a recompute of operator `{operator}`, which does not generate it"
    )]
    KeepsOther { event: usize, operator: String, tensor: String },
    #[error("event {event} keeps `{tensor}` twice")]
    KeepsTwice { event: usize, tensor: String },
    #[error("{step} needs `{tensor}`, which is not on the device then")]
    NotResident { step: String, tensor: String },
    #[error(
        "{step} needs version {wanted} of `{tensor}`, but the device holds version {found} then"
    )]
    WrongVersion { step: String, tensor: String, wanted: u32, found: u32 },
    #[error(
        "{step} writes `{tensor}`, which event {event} swaps out before, in the same residency"
    )]
    WrittenAfterSwapOut { step: String, tensor: String, event: usize },
    #[error(
        "{step} brings `{tensor}` to the device, where it still is: no event ends its residency"
    )]
    StillResident { step: String, tensor: String },
    #[error("event {event} takes `{tensor}` from the device, but it is not there")]
    NothingToEnd { event: usize, tensor: String },
    #[error("event {event} takes `{tensor}` from the device, but event {earlier} does so already")]
    EndedTwice { event: usize, tensor: String, earlier: usize },
    #[error("event {event} swaps `{tensor}` in, but the host has no copy of it")]
    NoHostCopy { event: usize, tensor: String },
    #[error(
        "event {event} swaps `{tensor}` in, but {writer} wrote the tensor after it was copied to the host"
    )]
    StaleHostCopy { event: usize, tensor: String, writer: String },
    #[error(
        "`{tensor}` starts the iteration on the device and does not end it there: the steady state does not close"
    )]
    LeavesDevice { tensor: String },
    #[error(
        "`{tensor}` starts the iteration on the host and ends it on the device: the steady state does not close"
    )]
    StaysOnDevice { tensor: String },
    #[error(
        "`{tensor}` starts the iteration on the host and ends it without a valid host copy of its last version: the steady state does not close"
    )]
    HostCopyLost { tensor: String },
    #[error("`{tensor}` is on the host but has no slot in the pinned pool")]
    SlotMissing { tensor: String },
    #[error("`{tensor}` has a slot in the pinned pool but is never on the host")]
    SlotUnused { tensor: String },
    #[error(
        "the slot of `{tensor}` in the pinned pool starts at {offset}, which is not a multiple of 512"
    )]
    SlotMisaligned { tensor: String, offset: u64 },
    #[error(
        "the slots of `{first}` and `{second}` in the pinned pool share bytes from offset {offset}, and both are on the host at once"
    )]
    SlotsOverlap { first: String, second: String, offset: u64 },
    #[error(
        "the slot of `{tensor}` ends at {end} bytes in the pinned pool, but the device's pinned budget is {pinned} bytes"
    )]
    BeyondPinned { tensor: String, end: u128, pinned: u64 },
    #[error("{place} has no placement")]
    NotPlaced { place: String },
    #[error("{place} is placed twice, at offsets {first} and {second}")]
    PlacedTwice { place: String, first: u64, second: u64 },
    #[error("placement {position} is of {place}, which the plan does not have")]
    PlacedNothing { position: usize, place: String },
    #[error("{place} is placed at offset {offset}, which is not a multiple of 512")]
    Misaligned { place: String, offset: u64 },
    #[error(
        "the window is handed over after operator {id}, but the graph has {operators} operators"
    )]
    WindowOperator { id: u32, operators: usize },
    #[error("the operators after which the window is handed over do not stand in ascending order")]
    WindowOrder,
    #[error("the window ends at {end} bytes, but the budget is {budget} bytes")]
    WindowBeyondBudget { end: u128, budget: u64 },
    #[error(
        "{place} lies across the border of the window; everything lies in it whole or outside it whole"
    )]
    WindowBorder { place: String },
    #[error(
        "{place} lies in the window and is there at the iteration's boundary, where the job holds nothing but bytes of its own"
    )]
    WindowAtBoundary { place: String },
    #[error(
        "the windows of {first} and {second} differ; all jobs of a plan that have one have the same"
    )]
    WindowsDiffer { first: String, second: String },
    #[error(
        "{place}, placed at offset {offset}, ends at {end} bytes, but the budget is {budget} bytes"
    )]
    BeyondBudget { place: String, offset: u64, end: u128, budget: u64 },
    #[error(
        "{first} and {second} share bytes from offset {offset}, and the first is there until the end of the iteration"
    )]
    Overlap { first: String, second: String, offset: u64 },
    #[error("these wait for each other in a circle: {}", circle.join("; "))]
    Deadlock { circle: Vec<String> },
    #[error("the iteration takes more nanoseconds than 64 bits hold")]
    TooLong,
    #[error("the plan says that `{figure}` is {claimed}, but it is {found}")]
    Figure { figure: &'static str, claimed: u64, found: u128 },
    #[error("further reasons are left out")]
    More,
}

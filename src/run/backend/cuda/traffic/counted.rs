//! The closed forms against what kernels really load and store, counted as they run on the host.

use std::sync::{Mutex, OnceLock, PoisonError};

use libloading::{Library, Symbol};

use super::charged;
use crate::backend::cuda::emit;
use crate::backend::cuda::launch::{Action, Actions};
use crate::backend::cuda::shim::{self, present, span};
use crate::backend::host::kernels::Kernel;
use crate::backend::operators::KernelError;
use crate::backend::operators::view::Call;

/// What the compiler calls before each access with -fsanitize=thread: adds up the bytes of those
/// that lie within given ranges.
const COUNTER: &str = r#"
#define QUIET __attribute__((no_sanitize("thread")))
static unsigned long long counted_bytes = 0, counted_ranges[512], counted_ends = 0;
QUIET static void count(void* at, unsigned long long bytes) {
    unsigned long long place = (unsigned long long)at;
    for (unsigned long long i = 0; i < counted_ends; i += 2)
        if (place >= counted_ranges[i] && place < counted_ranges[i + 1]) {
            counted_bytes += bytes;
            return;
        }
}
#define SIZED(n)                                                    \
    QUIET void __tsan_read##n(void* at) { count(at, n); }            \
    QUIET void __tsan_write##n(void* at) { count(at, n); }           \
    QUIET void __tsan_unaligned_read##n(void* at) { count(at, n); }  \
    QUIET void __tsan_unaligned_write##n(void* at) { count(at, n); }
extern "C" {
SIZED(1) SIZED(2) SIZED(4) SIZED(8) SIZED(16)
QUIET void __tsan_read_range(void* at, unsigned long bytes) { count(at, bytes); }
QUIET void __tsan_write_range(void* at, unsigned long bytes) { count(at, bytes); }
QUIET void __tsan_init() {}
QUIET void count_within(const unsigned long long* ranges, unsigned long long ends) {
    counted_bytes = 0;
    counted_ends = ends < 512 ? ends : 512;
    for (unsigned long long i = 0; i < counted_ends; i++) counted_ranges[i] = ranges[i];
}
QUIET unsigned long long counted() { return counted_bytes; }
}
"#;

fn libraries() -> &'static Mutex<Vec<Library>> {
    static ALL: OnceLock<Mutex<Vec<Library>>> = OnceLock::new();
    ALL.get_or_init(|| {
        let flags = [
            "-fsanitize=thread",
            "--param=tsan-instrument-func-entry-exit=0",
            "-fno-tree-loop-distribute-patterns",
            "-fno-threadsafe-statics",
        ];
        // Linked without the sanitizer's own library: COUNTER stands in for it.
        Mutex::new(shim::compile(&flags, COUNTER).unwrap())
    })
}

/// A call's actions, once; each launch must touch as many bytes as its closed form says.
fn counting(call: &Call<'_>) -> Result<(), KernelError> {
    let mut status = 0i64;
    let mut actions = Actions::new(&raw mut status, 7);
    emit::find(&call.operator.kind).ok_or("CUDA has no such operator")?(call, &mut actions)?;
    let libraries = libraries().lock().unwrap_or_else(PoisonError::into_inner);
    let mut scratch = vec![0u64; shim::scratch(&actions.list)];
    let beside = scratch.as_mut_ptr().expose_provenance() as u64;
    let mut ranges: Vec<u64> = vec![beside, beside + 8 * scratch.len() as u64];
    for view in call.views() {
        let begin = view.data.addr() as u64;
        ranges.extend([begin, begin + span(view) as u64]);
    }
    assert!(ranges.len() <= 512, "{}: {} views", call.operator.kind, ranges.len() / 2);
    for action in &actions.list {
        let Action::Launch(launch) = action else {
            shim::run(std::slice::from_ref(action), 0);
            continue;
        };
        let mut launch = launch.clone();
        launch.place(beside);
        // SAFETY: both functions are COUNTER's.
        unsafe {
            let at = shim::place(launch.family);
            let within: Symbol<'_, unsafe extern "C" fn(*const u64, u64)> =
                libraries[at].get(b"count_within").unwrap();
            let counted: Symbol<'_, unsafe extern "C" fn() -> u64> =
                libraries[at].get(b"counted").unwrap();
            within(ranges.as_ptr(), ranges.len() as u64);
            shim::launch(&libraries, &launch, 0);
            let (formula, seen) = (charged(&launch).bytes, counted());
            // Targets that are to be ignored have no scores looked up.
            let ignored = launch.kernel.starts_with("likelihood");
            assert!(
                formula == seen || ignored && seen < formula && 20 * seen >= 19 * formula,
                "{} of {}: {seen} bytes, not {formula}",
                launch.kernel,
                call.operator.kind
            );
        }
    }
    Ok(())
}

/// Every launch of an iteration of a small convolutional net and of a small GPT-2.
#[test]
fn kernels_touch_the_bytes_of_their_closed_forms() {
    if present() {
        let kernels: shim::Lookup = |kind| emit::find(kind).map(|_| counting as Kernel);
        for base in ["tiny_cnn-adam", "tiny_cnn-sgd-maximize", "tiny_gpt2-adamw"] {
            shim::iterations(base, kernels, 1);
        }
    }
}

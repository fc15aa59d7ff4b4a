//! Runs actions on the host with the kernels compiled as C++: their arithmetic, indices and
//! barriers, without a GPU.
//!
//! Each launch runs three times from the same memory, its threads in three orders, and must give
//! the same bits: a missing barrier between threads of a block would show. What this leaves
//! unchecked: concurrency between blocks, real memory models, the GPU's own mathematical functions
//! and fused multiplications, and the two libraries (matrix products are the host's here,
//! convolutions the plain kernels).

use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};

use libloading::{Library, Symbol};

use super::emit;
use super::gemm::{Stored, stored};
use super::launch::{Action, Actions, Conv, Family, Gemm, Launch};
use super::params::SMALL_PARTS;
use crate::Outcome;
use crate::backend::host::kernels::elements::Lane;
use crate::backend::host::kernels::half::{from_bf16, to_bf16};
use crate::backend::host::kernels::{against_pytorch, pytorch};
use crate::backend::operators::KernelError;
use crate::backend::operators::view::{Call, View};
use crate::job::Dtype;

#[repr(C)]
#[derive(Clone, Copy)]
struct Dim {
    x: u32,
    y: u32,
    z: u32,
}

type Entry = unsafe extern "C" fn(*const u8, u32, Dim, Dim, i32);

/// One library for each family; `None` where there is no C++ compiler. Held by the test that runs:
/// kernels keep their block in statics.
fn libraries() -> Option<&'static Mutex<Vec<Library>>> {
    static ALL: OnceLock<Option<Mutex<Vec<Library>>>> = OnceLock::new();
    ALL.get_or_init(|| compile(&[], "").map(Mutex::new)).as_ref()
}

/// Compiles each family with more flags and more source; `None` where there is no compiler.
pub fn compile(flags: &[&str], more: &str) -> Option<Vec<Library>> {
    let here = &Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let shim = std::fs::read_to_string(here.join("kernels/shim.h")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let one = |family: Family| {
        let at = |ending: &str| folder.path().join(format!("{}.{ending}", family.name()));
        std::fs::write(at("cpp"), [&shim, "\n", &family.source(), more].concat()).unwrap();
        let usual = ["-std=c++17", "-O2", "-U_FORTIFY_SOURCE", "-ffp-contract=off", "-fPIC", "-w"];
        let run = |arguments: &[&str], to: &str, from: &str| {
            let mut command = Command::new("c++");
            let output = command.args(arguments).arg("-o").arg(at(to)).arg(at(from)).output();
            let output = output.ok()?;
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{}: {said}", family.name());
            Some(())
        };
        // Linked apart: with some flags the compiler would link a library of its own.
        run(&[&usual[..], flags, &["-c"]].concat(), "o", "cpp")?;
        run(&["-shared"], "so", "o")?;
        // SAFETY: the library has no initialisers beyond those of its statics.
        Some(unsafe { Library::new(at("so")) }.unwrap())
    };
    std::thread::scope(|scope| {
        let running: Vec<_> =
            Family::ALL.into_iter().map(|family| scope.spawn(move || one(family))).collect();
        running.into_iter().map(|one| one.join().unwrap()).collect()
    })
}

/// Whether kernels can be compiled; says so where they can't, and fails where they must be.
pub fn present() -> bool {
    let present = libraries().is_some();
    assert!(
        present || std::env::var_os("NEAP_REQUIRE_NVRTC").is_none(),
        "there is no C++ compiler"
    );
    if !present {
        println!("skipped: kernels on the host: there is no C++ compiler");
    }
    present
}

/// Where a family's library is.
pub fn place(family: Family) -> usize {
    Family::ALL.iter().position(|f| *f == family).unwrap()
}

/// Runs a kernel.
pub fn launch(libraries: &[Library], launch: &Launch, order: i32) {
    let at = place(launch.family);
    // SAFETY: every kernel is exported with this signature, and refuses parameters of another size.
    let entry: Symbol<'_, Entry> = unsafe { libraries[at].get(launch.kernel.as_bytes()) }
        .unwrap_or_else(|_| panic!("{}: no {}", launch.family.name(), launch.kernel));
    // SAFETY: as above; the parameters' addresses are those of the test's own tensors. `u64` words
    // align the copy.
    unsafe {
        let mut params = vec![0u64; launch.params.len().div_ceil(8)];
        params
            .as_mut_ptr()
            .cast::<u8>()
            .copy_from_nonoverlapping(launch.params.as_ptr(), launch.params.len());
        let (grid, block) = (
            Dim { x: launch.grid, y: 1, z: 1 },
            Dim { x: launch.block[0], y: launch.block[1], z: 1 },
        );
        entry(params.as_ptr().cast(), launch.params.len() as u32, grid, block, order);
    }
}

/// As the library does by its definition: matrices stored by columns, turned where said, sums in
/// f32 or better.
fn gemm(g: &Gemm) {
    let [a, b, c] = stored(g).expect("what is sent to the library can be stored its way");
    let [m, n, k] = [c.rows, c.columns, if a.transposed { a.rows } else { a.columns }];
    assert_eq!((m, k), if a.transposed { (a.columns, a.rows) } else { (a.rows, a.columns) });
    assert_eq!((k, n), if b.transposed { (b.columns, b.rows) } else { (b.rows, b.columns) });
    assert!(a.step >= a.rows && b.step >= b.rows && c.step >= c.rows, "{g:?}");
    let place = |of: &Stored, row: i64, column: i64| {
        if of.transposed { column + row * of.step } else { row + column * of.step }
    };
    // SAFETY: addresses and steps were checked against the tensors that the action was made for.
    unsafe {
        let size = g.dtype.size() as isize;
        let read = |data: *mut u8, at: i64| {
            let mut one = [0.0f32];
            f32::load(g.dtype, data.offset(at as isize * size), 1, &mut one);
            f64::from(one[0])
        };
        for batch in 0..g.batch {
            for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                let mut sum = 0.0f64;
                for p in 0..k {
                    sum += read(g.b.data, batch * g.b.batch + place(&a, i, p))
                        * read(g.a.data, batch * g.a.batch + place(&b, p, j));
                }
                let at = batch * g.c.batch + place(&c, i, j);
                let before =
                    if g.beta == 0.0 { 0.0 } else { f64::from(g.beta) * read(g.c.data, at) };
                // A bias has an element for each row of the library's result.
                let bias = if g.bias.is_null() { 0.0 } else { read(g.bias, i) };
                let value = (f64::from(g.alpha) * sum + before + bias) as f32;
                f32::store(g.dtype, g.c.data.offset(at as isize * size), 1, &[value]);
            }
        }
    }
}

/// Eights of bytes that actions want beside the arena.
pub fn scratch(actions: &[Action]) -> usize {
    let beside = |a: &Action| match a {
        Action::Launch(one) => one.beside.map_or(0, |(_, bytes)| bytes),
        _ => 0,
    };
    actions.iter().map(beside).max().unwrap_or(0).div_ceil(8) as usize
}

/// Carries out actions, each launch's threads in one of three orders.
pub fn run(actions: &[Action], order: i32) {
    let libraries = libraries().unwrap().lock().unwrap_or_else(PoisonError::into_inner);
    // Between canaries.
    let most = scratch(actions);
    let mut scratch = vec![u64::MAX; most + 2];
    for action in actions {
        match action {
            Action::Launch(one) => {
                let mut one = one.clone();
                one.place(scratch[1..].as_mut_ptr().expose_provenance() as u64);
                launch(&libraries, &one, order);
            }
            Action::Conv(conv) => launch(&libraries, &Conv::plain(conv), order),
            Action::Gemm(g) => gemm(g),
            // SAFETY: inside the tensors that the actions were made for.
            Action::Copy { from, to, bytes } => unsafe { std::ptr::copy(*from, *to, *bytes) },
            // SAFETY: as above.
            Action::Zero { to, bytes } => unsafe { to.write_bytes(0, *bytes) },
            // SAFETY: as above.
            Action::Upload { to, data } => unsafe {
                to.copy_from_nonoverlapping(data.as_ptr(), data.len())
            },
        }
    }
    assert_eq!([scratch[0], scratch[most + 1]], [u64::MAX; 2], "written beside what was asked for");
}

/// All bytes that a view spans.
pub fn span(view: &View) -> usize {
    if view.shape.contains(&0) || view.data.is_null() {
        return 0;
    }
    let last: usize = view.shape.iter().zip(&view.stride).map(|(n, s)| (n - 1) * s).sum();
    (last + 1) * view.dtype.size() as usize
}

/// A call's actions, three times from the same memory.
pub fn call(call: &Call<'_>) -> Result<(), KernelError> {
    let mut status = 0i64;
    let mut actions = Actions::new(&raw mut status, 7);
    emit::find(&call.operator.kind).ok_or("CUDA has no such operator")?(call, &mut actions)?;
    let written: Vec<&View> = call.outputs.iter().flatten().chain(call.hidden).collect();
    let read = || {
        // SAFETY: spans lie inside the tests' tensors.
        let bytes = |v: &View| unsafe { std::slice::from_raw_parts(v.data, span(v)) }.to_vec();
        written.iter().map(|v| bytes(v)).collect::<Vec<_>>()
    };
    let before = read();
    run(&actions.list, 0);
    let first = read();
    for order in 1..3 {
        for (view, bytes) in written.iter().zip(&before) {
            // SAFETY: as above.
            unsafe { view.data.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        }
        run(&actions.list, order);
        if read() != first {
            return Err("its result depends on the order of its threads".into());
        }
    }
    if status == 0 { Ok(()) } else { Err("a number out of range".into()) }
}

/// [`call`], with sums cut in parts of two terms or more.
fn in_parts(call: &Call<'_>) -> Result<(), KernelError> {
    SMALL_PARTS.set(true);
    let result = self::call(call);
    SMALL_PARTS.set(false);
    result
}

/// A call's actions, once.
fn once(call: &Call<'_>) -> Result<(), KernelError> {
    let mut status = 0i64;
    let mut actions = Actions::new(&raw mut status, 7);
    emit::find(&call.operator.kind).ok_or("CUDA has no such operator")?(call, &mut actions)?;
    run(&actions.list, 2);
    if status == 0 { Ok(()) } else { Err("a number out of range".into()) }
}

/// Finds the kernel of an operator's kind.
pub type Lookup = super::super::host::calls::Lookup;

/// Iterations of a recorded job on the host by such kernels.
pub fn iterations(base: &str, kernels: Lookup, iterations: u32) -> Outcome {
    use crate::device::{builtin, latency};
    use crate::{Rate, Settings, plan::budget, run_with};
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
    let graph =
        crate::job::chakra::import(&folder.join(format!("{base}.et.json.gz")), &Default::default())
            .unwrap()
            .graph;
    let device = builtin::find("host").unwrap();
    let latencies = latency::latencies(&graph, &device, None);
    let request = budget::Request::new(&graph, &device, &latencies, crate::units::Bytes::ZERO);
    let unplanned = budget::unplanned(&request).unwrap().plan;
    let settings = Settings {
        iterations,
        weights: Some(folder.join(format!("{base}.safetensors"))).filter(|p| p.exists()),
        keep_state: true,
        link_rate: Rate::Unlimited,
        ..Default::default()
    };
    let plan = &unplanned.jobs[0];
    run_with(kernels, &graph, plan, unplanned.budget, &device, &settings, &mut |_| {}).unwrap()
}

/// Two iterations of a recorded job, every operator by its CUDA actions, against PyTorch's losses
/// (where the fixtures hold them) and, within `limit` of each tensor's norm, the host's state.
fn train(base: &str, limit: f64) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
    let cuda: Lookup =
        |kind| emit::find(kind).map(|_| once as crate::backend::host::kernels::Kernel);
    let ours = iterations(base, cuda, 2);
    let hosts = iterations(base, crate::backend::host::kernels::find, 2);
    let record = std::fs::read(folder.join(format!("{base}.json"))).ok();
    let record: Option<serde_json::Value> =
        record.map(|bytes| serde_json::from_slice(&bytes).unwrap());
    for (at, loss) in ours.losses.iter().enumerate() {
        let theirs = record
            .as_ref()
            .map_or(f64::from(hosts.losses[at]), |r| r["losses"][at].as_f64().unwrap());
        assert!(
            (f64::from(*loss) - theirs).abs() <= 1e-5 * theirs.abs(),
            "{base}: loss {at} is {loss}, not {theirs}"
        );
    }
    assert_eq!(ours.losses.len(), 2);
    let (ours, hosts) = (ours.state.unwrap(), hosts.state.unwrap());
    assert!(ours.len() > 3 && ours.keys().eq(hosts.keys()));
    let mut worst = 0.0f64;
    for (key, value) in &ours {
        if value.dtype == Dtype::F32 {
            let floats = |data: &[u8]| {
                data.chunks_exact(4)
                    .map(|four| f32::from_le_bytes(four.try_into().unwrap()))
                    .collect::<Vec<_>>()
            };
            let (a, b) = (floats(&value.data), floats(&hosts[key].data));
            let norm = |x: &mut dyn Iterator<Item = f32>| {
                x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt()
            };
            let (off, size) =
                (norm(&mut a.iter().zip(&b).map(|(a, b)| a - b)), norm(&mut b.iter().copied()));
            assert!(
                off <= limit * size.max(1e-2),
                "{base}: {key} is {off} from the host's, of {size}"
            );
            worst = worst.max(off / size.max(1e-2));
        }
    }
    println!("{base}: final state at most {worst:.1e} from the host's");
}

#[test]
fn whole_trainings_agree_with_pytorch() {
    if present() {
        train("tiny_cnn-sgd-maximize", 1e-5);
        // Adam divides by the gradient's own size: where that is hardly more than rounding, a step
        // may go either way.
        train("tiny_cnn-adam", 2e-2);
        train("tiny_gpt2-adamw", 2e-2);
    }
}

/// What CUDA refuses of operators that it has: masks as indices, pads with a mode, convolutions of
/// other than two dimensions, and norms of other orders than 1, 2 and infinity.
fn only_on_host(case: &serde_json::Value) -> bool {
    let args = &case["args"];
    let images = args[1]["tensor"]["shape"].as_array();
    match case["kind"].as_str().unwrap() {
        "aten::index" => args[1].to_string().contains("\"bool\""),
        "aten::pad" => args[2]["text"].as_str().is_some_and(|mode| mode != "constant"),
        "aten::convolution_backward" => images.is_none_or(|shape| shape.len() != 4),
        "aten::linalg_vector_norm" | "aten::norm" | "aten::_foreach_norm" => {
            let order = &args[1];
            let named = order["float"].as_f64().or_else(|| order["int"].as_f64());
            named.is_some_and(|order| ![1.0, 2.0].contains(&order))
                || order["float"]["special"] == "-inf"
        }
        _ => false,
    }
}

#[test]
fn elementwise_rows_and_shapes_agree_with_pytorch() {
    if present() {
        let has = |case: &serde_json::Value| {
            emit::find(case["kind"].as_str().unwrap()).is_some() && !only_on_host(case)
        };
        pytorch::every_case(&call, &has);
        let sums = ["sum", "mean", "prod", "amax", "amin", "all", "any", "norm"];
        pytorch::every_case(&in_parts, &|case| {
            has(case) && sums.iter().any(|s| case["kind"].as_str().unwrap().contains(s))
        });
    }
}

#[test]
fn dense_operators_agree_with_pytorch() {
    if present() {
        against_pytorch::every_case(&call);
        against_pytorch::every_case(&in_parts);
    }
}

/// Each operator's result in bf16 is its result in f32, of the same numbers, rounded once.
#[test]
fn bf16_is_f32_rounded() {
    use crate::backend::host::kernels::pytorch::{Bench, Owned};
    use crate::backend::operators::shapes::row_major;
    use crate::backend::operators::view::Operand;
    use crate::job::Arg;
    if !present() {
        return;
    }
    let number = |i: usize| from_bf16(to_bf16(((i * 7919 + 13) % 101) as f32 / 25.0 - 2.0));
    let run =
        |dtype: Dtype, kind: &str, shapes: &[&[usize]], plain: &[Arg], out: &[usize]| -> Vec<f32> {
            let make = |shape: &[usize]| Owned::new(dtype, shape, &row_major(shape), 0);
            let at =
                |owned: &Owned, i: usize| owned.view.data.wrapping_add(i * dtype.size() as usize);
            let inputs: Vec<Owned> = shapes.iter().map(|s| make(s)).collect();
            for owned in &inputs {
                for i in 0..owned.view.shape.iter().product() {
                    // SAFETY: the storage has that many elements of the type.
                    unsafe {
                        match dtype {
                            Dtype::Bf16 => {
                                at(owned, i).cast::<u16>().write_unaligned(to_bf16(number(i)))
                            }
                            _ => at(owned, i).cast::<f32>().write_unaligned(number(i)),
                        }
                    }
                }
            }
            let result = make(out);
            let args = shapes.iter().map(|_| Arg::None).chain(plain.iter().cloned()).collect();
            let operands = inputs
                .iter()
                .map(|o| Operand::Tensor(o.view.clone()))
                .chain(plain.iter().map(|_| Operand::Plain))
                .collect();
            Bench::new(kind, args, operands, &[&result], &[])
                .run_on(&call)
                .unwrap_or_else(|e| panic!("{kind}: {e}"));
            (0..out.iter().product())
                // SAFETY: as above.
                .map(|i| unsafe {
                    match dtype {
                        Dtype::Bf16 => from_bf16(at(&result, i).cast::<u16>().read_unaligned()),
                        _ => at(&result, i).cast::<f32>().read_unaligned(),
                    }
                })
                .collect()
        };
    let (square, wide): (&[usize], &[usize]) = (&[5, 7], &[7, 9]);
    let pool = [
        Arg::Ints(vec![2, 2]),
        Arg::Ints(vec![2, 2]),
        Arg::Ints(vec![0, 0]),
        Arg::Bool(false),
        Arg::Bool(true),
        Arg::None,
    ];
    let image: &[usize] = &[2, 3, 4, 4];
    let convolution = [
        Arg::None,
        Arg::Ints(vec![1, 1]),
        Arg::Ints(vec![1, 1]),
        Arg::Ints(vec![1, 1]),
        Arg::Int(1),
    ];
    type Case<'a> = (&'a str, Vec<&'a [usize]>, &'a [Arg], &'a [usize]);
    let cases: [Case<'_>; 8] = [
        ("aten::add", vec![square, square], &[], square),
        ("aten::add", vec![square, &[5, 1]], &[], square),
        ("aten::gelu", vec![square], &[Arg::Text("none".into())], square),
        ("aten::sum", vec![square], &[Arg::Ints(vec![1]), Arg::Bool(false), Arg::None], &[5]),
        ("aten::_softmax", vec![square], &[Arg::Int(1), Arg::Bool(false)], square),
        ("aten::mm", vec![square, wide], &[], &[5, 9]),
        ("aten::avg_pool2d", vec![image], &pool, &[2, 3, 2, 2]),
        ("aten::conv2d", vec![image, &[4, 3, 3, 3]], &convolution, &[2, 4, 4, 4]),
    ];
    for (kind, shapes, plain, out) in &cases {
        let (full, half) =
            (run(Dtype::F32, kind, shapes, plain, out), run(Dtype::Bf16, kind, shapes, plain, out));
        for (f, h) in full.iter().zip(&half) {
            // Sums in another order may fall to the other side of a tie.
            assert!((f - h).abs() <= f.abs() / 256.0 + 1e-6, "{kind}: {h} for {f}");
        }
        assert!(full.iter().any(|f| f.abs() > 0.1), "{kind}");
    }
}

/// Gradients of a table's rows are added in the order of the places that name them: with places
/// that a block keeps, and with more; of the whole table, and of a piece of its rows.
#[test]
fn embeddings_add_in_order() {
    use crate::backend::host::kernels::pytorch::{Bench, Owned};
    use crate::backend::operators::shapes::row_major;
    use crate::backend::operators::view::Operand;
    use crate::job::Arg;
    if !present() {
        return;
    }
    const PLACES: usize = 700;
    const WIDTH: usize = 5;
    const PADDING: usize = 3;
    for rows in [20, 40] {
        let own = |dtype, shape: &[usize]| Owned::new(dtype, shape, &row_major(shape), 0);
        let gradient = own(Dtype::F32, &[PLACES, WIDTH]);
        let numbers = own(Dtype::I64, &[PLACES]);
        let number = |place: usize| place * 7 % rows;
        let part = |at: usize| ((at * 7919 + 13) % 101) as f32 / 30.0 - 1.7;
        let mut expected = vec![0.0f32; rows * WIDTH];
        for at in 0..PLACES * WIDTH {
            let (place, column) = (at / WIDTH, at % WIDTH);
            if number(place) != PADDING {
                expected[number(place) * WIDTH + column] += part(at);
            }
            // SAFETY: the storages have that many elements of their types.
            unsafe {
                gradient.view.data.cast::<f32>().add(at).write_unaligned(part(at));
                let to = numbers.view.data.cast::<i64>().add(place);
                to.write_unaligned(number(place) as i64);
            }
        }
        let pieces = (0..rows).step_by(9).map(|first| (first, 9.min(rows - first)));
        for (first, count) in pieces.chain([(0, rows)]) {
            let result = own(Dtype::F32, &[count, WIDTH]);
            let of = match count == rows {
                true => Arg::Int(rows as i64),
                false => Arg::Ints(vec![first as i64, rows as i64]),
            };
            let plain = [of, Arg::Int(PADDING as i64), Arg::Bool(false)];
            let args = [Arg::None, Arg::None].into_iter().chain(plain).collect();
            let tensors = [&gradient, &numbers].map(|o| Operand::Tensor(o.view.clone()));
            let operands = tensors.into_iter().chain([(); 3].map(|()| Operand::Plain)).collect();
            let kind = "aten::embedding_dense_backward";
            Bench::new(kind, args, operands, &[&result], &[]).run_on(&call).unwrap();
            for (at, expected) in expected[first * WIDTH..][..count * WIDTH].iter().enumerate() {
                // SAFETY: as above.
                let got = unsafe { result.view.data.cast::<f32>().add(at).read_unaligned() };
                let place = format!("{rows} rows, {count} from {first} on, element {at}");
                assert_eq!(got.to_bits(), expected.to_bits(), "{place}");
            }
        }
    }
}

//! Every kernel compiled by NVRTC and assembled by ptxas for sm_90, without a GPU: no errors, no
//! spills, and enough threads in flight at the shapes of recorded models.
//!
//! `bench/gpu/occupancy.md` is the table; `NEAP_BLESS=1` writes it anew. The compiler comes from
//! `tools/cuda-wheels`; where it can't be had, this is skipped, unless `NEAP_REQUIRE_NVRTC` is set.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::kernels::Nvrtc;
use super::launch::{Action, Family, Launch};
use super::libs::{self, Which};
use super::params::Attention;
use super::prepare;
use crate::backend::host::calls::operands;
use crate::backend::{StepWork, Work};
use crate::device::{builtin, roofline};
use crate::job::{Arg, Dtype, Graph, Operator};
use crate::profile::first;
use crate::units::{Bytes, OpId};

/// An H100: multiprocessors; and of each its registers, shared memory, warps and blocks (CUDA C++
/// Programming Guide, compute capability 9.0).
const MULTIPROCESSORS: u64 = 132;
const REGISTERS: u64 = 65_536;
const SHARED: u64 = 228 << 10;
const WARPS: u64 = 64;
const BLOCKS: u64 = 32;

/// The least occupancy of a kernel, and the least part of the multiprocessors that its launches
/// fill, in percent; launches weigh by their operators' bytes.
const FLOOR: (u64, u64) = (50, 90);

/// Kernels that are below it, by how their names begin: attention, whose threads have much to do at
/// once in place of being many; losses, which touch one element of each row.
const BELOW: [(&str, (u64, u64)); 2] = [("attention", (12, 90)), ("likelihood", (50, 0))];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The folder with lib/ and bin/, or why there is none.
fn compiler() -> Result<PathBuf, String> {
    let script = root().join("tools/cuda-wheels");
    let output =
        Command::new(&script).output().map_err(|e| format!("{}: {e}", script.display()))?;
    if !output.status.success() {
        return Err(format!("{}: {}", script.display(), String::from_utf8_lossy(&output.stderr)));
    }
    Ok(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()))
}

/// What ptxas says of a kernel.
#[derive(Clone, Copy)]
struct Needs {
    registers: u64,
    stack: u64,
    shared: u64,
    spills: bool,
}

fn assemble(ptxas: &Path, ptx: &[u8], folder: &Path, family: Family) -> Vec<(String, Needs)> {
    let source = folder.join(format!("{}.ptx", family.name()));
    std::fs::write(&source, ptx.strip_suffix(b"\0").unwrap_or(ptx)).unwrap();
    let output = Command::new(ptxas)
        .args(["-arch=sm_90", "-v", "--warn-on-spills", "-o"])
        .arg(source.with_extension("cubin"))
        .arg(&source)
        .output();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned()
        + &String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}: {said}", family.name());
    assert!(!said.contains("spilled"), "{}: {said}", family.name());
    let (mut kernels, mut entry, mut stack, mut spills) = (Vec::new(), String::new(), 0, false);
    for line in said.lines() {
        let number = |before: &str| -> Option<u64> {
            let (front, _) = line.split_once(before)?;
            front.rsplit([' ', ':', ',']).find(|w| !w.is_empty())?.parse().ok()
        };
        if line.contains("Compiling entry function") {
            entry = line.split('\'').nth(1).unwrap().to_owned();
        } else if line.contains("bytes stack frame") {
            stack = number(" bytes stack frame").unwrap();
            spills = !line.contains(" 0 bytes spill stores, 0 bytes spill loads");
        } else if line.contains("Used ") {
            let registers = number(" registers").unwrap();
            let shared = number(" bytes smem").unwrap_or(0);
            kernels.push((entry.clone(), Needs { registers, stack, shared, spills }));
        }
    }
    kernels
}

/// Blocks of a kernel that a multiprocessor holds at once, and its occupancy in percent: warps of
/// those that it could hold.
fn held(needs: Needs, threads: u64) -> (u64, u64) {
    let warps = threads.div_ceil(32);
    // Registers are given by the warp, in steps of 256; a block takes 1 KiB of shared memory beside
    // its own.
    let by_registers = REGISTERS / (needs.registers.next_multiple_of(8) * 32).max(1) / warps;
    let by_shared = SHARED / (needs.shared.next_multiple_of(128) + 1024);
    let blocks = by_registers.min(by_shared).min(WARPS / warps).min(BLOCKS);
    (blocks, 100 * blocks * warps / WARPS)
}

/// The actions of each operator of an iteration, at addresses through which nothing is read.
pub fn actions(graph: &Graph) -> Vec<(&Operator, Vec<Action>)> {
    let (item, addresses) = first(graph, Bytes::ZERO);
    let Work::Step(blank) = item.work else { panic!("a step") };
    let one = |(index, operator): (usize, &'_ Operator)| {
        let work = StepWork {
            operator: OpId::from_index(index),
            addresses: addresses.iter().map(|(t, at)| (*t, *at)).collect(),
            ..blank.clone()
        };
        let at = |offset: Bytes, _: Bytes| {
            Some(std::ptr::without_provenance_mut((1 << 40) + usize::try_from(offset.0).ok()?))
        };
        let seen = operands(graph, &work, &at).unwrap();
        prepare::emitted(graph, &work, &seen, &[], std::ptr::null_mut(), true)
            .unwrap_or_else(|e| panic!("{}: {e}", operator.name))
    };
    graph.operators.iter().enumerate().map(|(i, of)| (of, one((i, of)))).collect()
}

/// The launches of an iteration, with the bytes that the roofline counts for their operators.
fn launches(graph: &Graph) -> Vec<(Launch, u64)> {
    let mut all = Vec::new();
    for (operator, actions) in actions(graph) {
        let bytes = u64::try_from(roofline::bytes(operator)).unwrap();
        let mut kernels = Vec::new();
        for action in actions {
            let Action::Launch(launch) = action else { continue };
            // A second launch of the same kernel joins what the first has summed.
            let joins = launch.beside.is_some() && kernels.contains(&launch.kernel);
            kernels.push(launch.kernel.clone());
            all.push((launch, if joins { 0 } else { bytes }));
        }
    }
    all
}

/// The recorded models, by name.
pub fn models() -> Vec<(String, Graph)> {
    let folder = root().join("fixtures/models");
    let named = |file: std::io::Result<std::fs::DirEntry>| {
        let path = file.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let name = name.split('.').next().unwrap().to_owned();
        (name, crate::job::json::read(&path).unwrap())
    };
    let mut models: Vec<_> = std::fs::read_dir(folder).unwrap().map(named).collect();
    models.sort_by(|a, b| a.0.cmp(&b.0));
    models
}

/// A row of the table.
#[derive(Default)]
struct Row {
    count: u64,
    threads: (u64, u64),
    blocks: (u64, u64),
    occupancy: u64,
    /// Shared memory that launches ask for.
    shared: u64,
    /// Bytes of all launches, and those times the part of the multiprocessors with a block.
    bytes: u64,
    filled: u64,
}

fn rows(needs: &BTreeMap<String, Needs>, graph: &Graph, rows: &mut BTreeMap<String, Row>) {
    for (launch, bytes) in launches(graph) {
        let row = rows.entry(launch.kernel.clone()).or_default();
        let threads = u64::from(launch.block[0] * launch.block[1]);
        let of = needs[&launch.kernel];
        let of = Needs { shared: of.shared + u64::from(launch.shared), ..of };
        let (_, occupancy) = held(of, threads);
        let blocks = u64::from(launch.grid);
        row.shared = row.shared.max(u64::from(launch.shared));
        let spread = |of: (u64, u64), x: u64| {
            if row.count == 0 { (x, x) } else { (of.0.min(x), of.1.max(x)) }
        };
        (row.threads, row.blocks) = (spread(row.threads, threads), spread(row.blocks, blocks));
        row.occupancy = if row.count == 0 { occupancy } else { row.occupancy.min(occupancy) };
        row.count += 1;
        // What is over in a microsecond fills nothing and delays nothing.
        if bytes > 2 << 20 {
            row.bytes += bytes;
            row.filled += bytes * blocks.min(MULTIPROCESSORS) / MULTIPROCESSORS;
        }
    }
}

/// The attention of a graph, in bf16 if wanted.
fn attention_of(graph: &Graph, halves: bool) -> Graph {
    let attention = |o: &Operator| o.kind.contains("scaled_dot_product");
    let mut graph = graph.clone();
    graph.operators.retain(attention);
    for operator in graph.operators.iter_mut().filter(|_| halves) {
        let arguments = operator.args.iter_mut();
        let read = arguments.filter_map(|a| if let Arg::Tensor(o) = a { Some(o) } else { None });
        // Sums of rows have three dimensions, and stay.
        for operand in read.chain(operator.outputs.iter_mut().flatten()) {
            if operand.shape.len() == 4 {
                operand.dtype = Dtype::Bf16;
            }
        }
    }
    graph
}

/// What a kernel of attention does: operations, counting those of tiles that are partly hidden, and
/// bytes of device memory, each once; `None` of other kernels.
fn work_of(launch: &Launch) -> Option<(u64, u64)> {
    let tile = match launch.family {
        Family::AttentionBlocked | Family::AttentionMma => 64,
        _ => return None,
    };
    let (products, by_query, by_key) = match &launch.kernel {
        k if k.starts_with("attention_back_queries") => (3, 3, 2),
        k if k.starts_with("attention_back_keys") => (4, 2, 4),
        _ => (2, 2, 2),
    };
    // SAFETY: the bytes were made from such a structure.
    let p = unsafe { launch.params.as_ptr().cast::<Attention>().read_unaligned() };
    let [heads, queries, keys, width] =
        [p.batch * p.heads, p.queries, p.keys, p.width].map(|n| u64::try_from(n).unwrap());
    let (rows, columns) = (queries.div_ceil(tile), keys.div_ceil(tile));
    let tiles = if p.causal == 1 {
        (0..rows).map(|row| columns.min(row + 1)).sum()
    } else {
        rows * columns
    };
    let size = if launch.family == Family::AttentionMma { 2 } else { 4 };
    let flops = 2 * products * heads * tiles * tile * tile * width;
    Some((flops, size * heads * width * (by_query * queries + by_key * keys)))
}

/// The table of attention: what each kernel does, and how long an H100 takes for that at best.
fn attention_table(needs: &BTreeMap<String, Needs>, graph: &Graph, model: &str) -> String {
    let device = builtin::find("h100").unwrap();
    let mut table = format!(
        "\n## Attention of {model}\n\n\
         *In flight*: blocks that run at once. *Least*: the longer of operations at the peak rate \
         and bytes at the memory's,\nby the profile h100, for one launch.\n\n\
         | kernel | registers | shared bytes | blocks | in flight | MFLOP | KiB | FLOP per byte | \
         least µs | by |\n\
         | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |\n"
    );
    for halves in [false, true] {
        let mut seen = BTreeMap::new();
        for (launch, _) in launches(&attention_of(graph, halves)) {
            let Some(work) = work_of(&launch) else { continue };
            seen.entry(launch.kernel.clone()).or_insert((launch, work));
        }
        assert_eq!(seen.len(), 3, "{:?}", seen.keys());
        for (kernel, (launch, (flops, bytes))) in seen {
            let of = needs[&kernel];
            let of = Needs { shared: of.shared + u64::from(launch.shared), ..of };
            let blocks = u64::from(launch.grid);
            let (held, _) = held(of, u64::from(launch.block[0] * launch.block[1]));
            let rate = device.rate(if halves { Dtype::Bf16 } else { Dtype::F32 });
            let tenths = |work: u64, rate: u64| (work as u128 * 10_000_000).div_ceil(rate.into());
            let (computing, moving) = (tenths(flops, rate), tenths(bytes, device.memory_bandwidth));
            let least = computing.max(moving);
            writeln!(
                table,
                "| {kernel} | {} | {} | {blocks} | {} | {} | {} | {} | {}.{} | {} |",
                of.registers,
                of.shared,
                blocks.min(held * MULTIPROCESSORS),
                flops / 1_000_000,
                bytes >> 10,
                flops / bytes,
                least / 10,
                least % 10,
                if computing >= moving { "operations" } else { "memory" }
            )
            .unwrap();
        }
    }
    table
}

#[test]
fn every_kernel_compiles_none_spills_and_each_fills_the_device() {
    let required = std::env::var_os("NEAP_REQUIRE_NVRTC").is_some();
    let home = match compiler() {
        Ok(home) => home,
        Err(why) => {
            assert!(!required, "NVRTC is required, and not there: {why}");
            println!("skipped: kernels are not compiled: {why}");
            return;
        }
    };
    let nvrtc = Nvrtc::new(&libs::open(Which::Nvrtc, &[home.join("lib")]).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut needs = BTreeMap::new();
    for family in Family::ALL {
        let ptx = nvrtc.compile(family, "compute_90").unwrap_or_else(|e| panic!("{e}"));
        let kernels = assemble(&home.join("bin/ptxas"), &ptx, folder.path(), family);
        assert!(!kernels.is_empty(), "{}: no kernel", family.name());
        for (name, of) in &kernels {
            assert!(!of.spills, "{name} spills");
            assert!(of.registers > 0 && of.registers < 255, "{name}: {} registers", of.registers);
        }
        needs.extend(kernels);
    }
    assert!(needs.len() > 140, "{} kernels", needs.len());

    let mut table = String::from(
        "# Kernels at the shapes of recorded models\n\n\
         Written by a test, for an H100 (132 multiprocessors), from ptxas of CUDA 13.0 and the \
         launches of one training\niteration. *Occupancy*: warps that a multiprocessor holds at \
         once, of 64. *Filled*: multiprocessors that have a block,\nin launches whose operators \
         touch more than 2 MiB, weighted by those bytes.\n",
    );
    let mut low = Vec::new();
    for (model, graph) in models() {
        let mut all = BTreeMap::new();
        rows(&needs, &graph, &mut all);
        write!(
            table,
            "\n## {model}\n\n| kernel | launches | threads | blocks | registers | shared bytes | \
             stack bytes | occupancy % | filled % |\n\
             | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        )
        .unwrap();
        for (name, row) in all {
            let span =
                |(a, b): (u64, u64)| if a == b { a.to_string() } else { format!("{a}–{b}") };
            let filled = (row.bytes > 0).then(|| 100 * row.filled / row.bytes);
            let of = needs[&name];
            writeln!(
                table,
                "| {name} | {} | {} | {} | {} | {} | {} | {} | {} |",
                row.count,
                span(row.threads),
                span(row.blocks),
                of.registers,
                of.shared + row.shared,
                of.stack,
                row.occupancy,
                filled.map_or("-".to_owned(), |f| f.to_string())
            )
            .unwrap();
            let floor = BELOW.iter().find(|b| name.starts_with(b.0)).map_or(FLOOR, |b| b.1);
            if row.occupancy < floor.0 || filled.is_some_and(|f| f < floor.1) {
                low.push(format!(
                    "{model}: {name}: occupancy {} %, filled {filled:?} %",
                    row.occupancy
                ));
            }
        }
    }
    let gpt2 = crate::job::json::read(&root().join("fixtures/models/gpt2-4x512.graph.json.gz"));
    table += &attention_table(&needs, &gpt2.unwrap(), "gpt2-4x512");
    let path = root().join("bench/gpu/occupancy.md");
    if std::env::var_os("NEAP_BLESS").is_some() {
        std::fs::write(&path, &table).unwrap();
    }
    assert!(low.is_empty(), "below their floors:\n{}", low.join("\n"));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), table, "NEAP_BLESS=1 writes it anew");
}

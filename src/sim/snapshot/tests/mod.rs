//! The reader on real snapshots and on hostile ones.

mod readings;

use std::path::{Path, PathBuf};

use super::*;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/snapshots").join(name)
}

fn within(bytes: &[u8], device: Option<u32>, limit: u64) -> Result<Snapshot, Problem> {
    let mut budget = Budget::new(Bytes(limit));
    let pickle = Pickle::read(source(bytes), &mut budget, false)?;
    snapshot(&pickle, device, &mut budget)
}

fn source(bytes: &[u8]) -> Source {
    Source::new(Box::new(std::io::Cursor::new(bytes.to_vec())))
}

fn parse(bytes: &[u8]) -> Result<Snapshot, Problem> {
    within(bytes, None, 1 << 20)
}

/// Writes pickles by hand: strings, numbers, and opcodes between them.
#[derive(Clone, Default)]
struct Pen(Vec<u8>);

impl Pen {
    fn op(mut self, code: &[u8]) -> Self {
        self.0.extend_from_slice(code);
        self
    }

    fn text(self, text: &str) -> Self {
        self.op(&[0x8c, text.len() as u8]).op(text.as_bytes())
    }

    fn int(self, n: i64) -> Self {
        self.op(&[0x8a, 8]).op(&n.to_le_bytes())
    }

    fn event(self, action: &str, addr: i64, size: i64) -> Self {
        let key = if action == "oom" { "device_free" } else { "addr" };
        let pen = self.op(b"}(").text("action").text(action).text(key).int(addr);
        pen.text("size").int(size).text("stream").int(0).op(b"u")
    }
}

/// A block: address, requested size, size, state.
type Block = (i64, i64, i64, &'static str);

/// A snapshot of device 0 with these events and segments (address, size, blocks); `stack` names the
/// function that gives segments back.
fn recorded(
    events: &[(&str, i64, i64)],
    segments: &[(i64, i64, &[Block])],
    stack: Option<&str>,
) -> Vec<u8> {
    let mut pen = Pen::default().op(&[0x80, 4]).op(b"}(").text("device_traces").op(b"](](");
    for (action, addr, size) in events {
        pen = pen.event(action, *addr, *size);
        if let (Some(name), "segment_free") = (stack, *action) {
            let at = pen.0.len() - 1;
            pen.0.truncate(at);
            pen = pen
                .text("frames")
                .op(b"](}(")
                .text("name")
                .text(name)
                .text("filename")
                .text("/lib/torch/cuda/memory.py")
                .op(b"ueu");
        }
    }
    pen = pen.op(b"ee").text("segments").op(b"](");
    for (address, size, blocks) in segments {
        pen = pen
            .op(b"}(")
            .text("address")
            .int(*address)
            .text("total_size")
            .int(*size)
            .text("stream")
            .int(0);
        pen = pen.text("blocks").op(b"](");
        for (address, requested, size, state) in *blocks {
            pen =
                pen.op(b"}(").text("address").int(*address).text("requested_size").int(*requested);
            pen = pen.text("size").int(*size).text("state").text(state).op(b"u");
        }
        pen = pen.op(b"eu");
    }
    pen.op(b"e")
        .text("allocator_settings")
        .op(b"}")
        .text("PYTORCH_CUDA_ALLOC_CONF")
        .text("")
        .op(b"su.")
        .0
}

#[test]
fn the_innermost_line_outside_pytorch_is_kept() {
    let frame = |pen: Pen, file: &str, name: &str, line: i64| {
        let pen = pen.op(b"}(").text("name").text(name).text("filename").text(file);
        pen.text("line").int(line).op(b"u")
    };
    let mut pen = Pen::default().op(&[0x80, 4]).op(b"}(").text("device_traces").op(b"](](");
    let stacks: [&[(&str, &str, i64)]; 4] = [
        &[
            ("??", "malloc", 0),
            ("/lib/torch/nn/linear.py", "forward", 5),
            ("/home/me/nets/<b>.py", "forward", 12),
            ("/home/me/train.py", "main", 40),
        ],
        &[("/lib/torch/nn/linear.py", "forward", 5)],
        &[("Allocator.cpp", "alloc", 9)],
        // As the frame of `torch.cuda.empty_cache`, of which the words are known.
        &[("/lib/torch/cuda/memory.py", "empty_cache", 3), ("train.py", "", 7)],
    ];
    for (index, stack) in stacks.iter().enumerate() {
        pen = pen.event("alloc", 4096 * index as i64, 512);
        pen.0.pop();
        pen = pen.text("frames").op(b"](");
        pen = stack.iter().fold(pen, |pen, (file, name, line)| frame(pen, file, name, *line));
        pen = pen.op(b"eu");
    }
    let bytes = pen.op(b"ee").text("segments").op(b"]u.").0;
    let mut budget = Budget::new(Bytes(1 << 20));
    let pickle = Pickle::read(source(&bytes), &mut budget, true).unwrap();
    let found = snapshot(&pickle, None, &mut budget).unwrap();
    let lines: Vec<_> = (0..5).map(|id| found.lines.line(id)).collect();
    let wanted = [
        Some("nets/<b>.py:12 (forward)"),
        Some("nn/linear.py:5 (forward)"),
        None,
        Some("train.py:7"),
        None,
    ];
    assert_eq!(lines, wanted);
    // Without them the requests are the same.
    let plain = parse(&bytes).unwrap();
    assert_eq!((plain.requests, plain.lines.line(0)), (found.requests, None));
}

fn spell(requests: &[Request]) -> String {
    let one = |r: &Request| match r {
        Request::Allocate { id, bytes, .. } => format!("a{id}:{}", bytes.0),
        Request::Free { id } => format!("f{id}"),
        Request::EmptyCache => "e".to_owned(),
    };
    requests.iter().map(one).collect::<Vec<_>>().join(" ")
}

#[test]
fn a_real_snapshot_is_followed() {
    let snapshot = read(&fixture("tiny_cnn-adam-empty_cache.pickle.gz"), None).unwrap();
    let count = |f: fn(&Request) -> bool| snapshot.requests.iter().filter(|r| f(r)).count();
    // As Python counts the same snapshot's actions, and two calls of empty_cache.
    assert_eq!(count(|r| matches!(r, Request::Allocate { .. })), 205);
    assert_eq!(count(|r| matches!(r, Request::Free { .. })), 139);
    assert_eq!(count(|r| *r == Request::EmptyCache), 2);
    assert_eq!((snapshot.at_start, snapshot.streams.len(), snapshot.failed.len()), (0, 2, 0));
    let expected = snapshot.expected_reserved.unwrap();
    assert_eq!(expected.len(), snapshot.requests.len());
    // torch.cuda.max_memory_reserved() and memory_reserved() of the job.
    assert_eq!((expected.iter().max(), expected.last()), (Some(&96_468_992), Some(&94_371_840)));
    assert_eq!(expected[0], 2_097_152);
    assert_eq!(
        snapshot.settings,
        Settings {
            alloc_conf: Some(String::new()),
            expandable_segments: Some(false),
            ..Settings::default()
        }
    );
    assert_eq!(snapshot.requests[0], Request::Allocate { id: 0, bytes: Bytes(1728), stream: 0 });
}

#[test]
fn every_protocol_says_the_same() {
    let all: Vec<Vec<u8>> = ["0", "1", "2", "4"]
        .map(|p| std::fs::read(fixture(&format!("small-{p}.pickle"))).unwrap())
        .to_vec();
    let first = within(&all[0], None, 1 << 20).unwrap();
    assert_eq!((first.device, first.at_start, first.failed.as_slice()), (1, 3, [16].as_slice()));
    assert_eq!(first.capacity, Some(Bytes((123 << 20) + (2 << 20))));
    assert!(spell(&first.requests).starts_with("a0:131072 a1:65536 a2:131072 a3:1728 a4:64"));
    assert!(spell(&first.requests).ends_with("a15:1024 f0 f2 f1 a16:4294967296 f16"));
    for (i, bytes) in all.iter().enumerate() {
        assert!(looks_like_pickle(bytes), "{i}");
        let next = within(bytes, Some(1), 1 << 20).unwrap();
        assert_eq!(
            (next.requests, next.notes, next.settings),
            (first.requests.clone(), first.notes.clone(), first.settings.clone())
        );
        // Wherever the file is cut, that is where it is said to be.
        for end in 0..bytes.len() {
            match parse(&bytes[..end]) {
                Err(Problem::CutOff { offset }) => assert_eq!(offset, end as u64, "{i}"),
                other => panic!("{i} cut at {end}: {other:?}"),
            }
        }
    }
    assert!(
        !looks_like_pickle(b"op,id,bytes,stream\n")
            && !looks_like_pickle(b"{\"a\": 1}")
            && !looks_like_pickle(b"")
    );
}

#[test]
fn everything_but_plain_data_is_refused() {
    let listed =
        b"hgjpqr\x94N\x88\x89KMJ\x8a\x8bILFG\x8cUXT\x8dSVCB\x8e(}])dlt\x85\x86\x87aesu012\x80\x95.";
    let mut names = 0;
    for code in 0..=255u8 {
        let bytes = [&[0x80, 4, b'N', b'0', code][..], &[b'\n'; 32]].concat();
        match parse(&bytes) {
            Err(Problem::Refused { offset: 4, name }) => {
                assert!(!listed.contains(&code), "{name}");
                names += 1;
            }
            Err(Problem::Unknown { offset: 4, code: c }) => {
                assert!(c == code && !listed.contains(&code))
            }
            other => assert!(listed.contains(&code), "0x{code:02x}: {other:?}"),
        }
    }
    assert_eq!(names, 19);
    // os.system("true"), as every tutorial on pickle shows it.
    let error = parse(b"cos\nsystem\n(S'true'\ntR.").unwrap_err().to_string();
    assert!(
        error.contains("GLOBAL at byte 0 is refused") && error.contains("_dump_snapshot"),
        "{error}"
    );
}

#[test]
fn what_was_live_before_comes_first() {
    let blocks: &[Block] = &[
        (4096, 100, 512, "active_allocated"),
        (4608, 700, 1024, "active_pending_free"),
        (8192, 1, 2_093_056, "inactive"),
    ];
    let bytes = recorded(
        &[
            ("free_requested", 9000, 30),
            ("free_completed", 9000, 30),
            ("alloc", 4608, 700),
            ("free_requested", 4608, 700),
        ],
        &[(4096, 2_097_152, blocks)],
        None,
    );
    let snapshot = parse(&bytes).unwrap();
    assert_eq!(spell(&snapshot.requests), "a0:100 a1:30 f1 a2:700");
    assert_eq!(
        (snapshot.at_start, snapshot.expected_reserved, snapshot.reserved_at_start),
        (2, None, Bytes(2_097_152))
    );
    assert!(
        snapshot.notes.iter().any(|n| n.contains("2 blocks were live")),
        "{:?}",
        snapshot.notes
    );
}

#[test]
fn shared_and_cyclic_values_stay_small() {
    // Thirty levels of ten references each.
    let mut pen = Pen::default().op(&[0x80, 4]).op(b"](K\x01e\x94");
    for level in 0..30u8 {
        pen = pen.op(b"](");
        for _ in 0..10 {
            pen = pen.op(&[b'h', level]);
        }
        pen = pen.op(b"e\x94");
    }
    assert!(matches!(parse(&pen.clone().op(b".").0), Err(Problem::NoSnapshot(_))));
    // A list in itself, as the traces, the events and the blocks.
    let cycle = b"\x80\x04}(\x8c\x0ddevice_traces]\x94h\x00a\x8c\x08segmentsh\x00u.";
    assert!(matches!(parse(cycle), Err(Problem::Contradiction(_))));
    // One segment a thousand times, with a thousand blocks.
    let mut pen = Pen::default()
        .op(&[0x80, 4])
        .op(b"}(")
        .text("device_traces")
        .op(b"](](")
        .event("alloc", 1, 1)
        .op(b"ee");
    pen = pen
        .text("segments")
        .op(b"](}(")
        .text("address")
        .int(0)
        .text("total_size")
        .int(0)
        .text("stream")
        .int(0)
        .text("blocks")
        .op(b"](}(");
    pen =
        pen.text("address").int(0).text("size").int(0).text("state").text("inactive").op(b"u\x94");
    for _ in 0..999 {
        pen = pen.op(b"h\x00");
    }
    pen = pen.op(b"eu\x94");
    for _ in 0..999 {
        pen = pen.op(b"h\x01");
    }
    assert!(matches!(parse(&pen.op(b"eu.").0), Err(Problem::NoSnapshot(m)) if m.contains("share")));
}

#[test]
fn memory_stays_within_its_limit() {
    for unit in [&b"]"[..], b"}", b"N", b"(0]\x94", b")\x94"] {
        let bytes = [&[0x80, 4][..], &unit.repeat(100_000)].concat();
        assert!(matches!(within(&bytes, None, 100_000), Err(Problem::TooLarge { .. })), "{unit:?}");
    }
    // Memo indices without end are no table of that size; a string of 2^62 bytes is no buffer.
    let sparse: Vec<u8> = (0..10_000u32)
        .flat_map(|i| [&b"Nr"[..], &(u32::MAX - i).to_le_bytes(), b"0"].concat())
        .collect();
    assert!(matches!(parse(&sparse), Err(Problem::TooLarge { .. })));
    assert!(matches!(parse(b"\x8d\0\0\0\0\0\0\0\x40"), Err(Problem::CutOff { offset: 9 })));
    let marks = vec![b'('; 2000];
    assert!(matches!(parse(&marks), Err(Problem::Malformed { offset: 1000, .. })));
}

#[test]
fn devices_are_named() {
    let two = Pen::default()
        .op(&[0x80, 4])
        .op(b"}(")
        .text("device_traces")
        .op(b"](](")
        .event("alloc", 1, 1)
        .op(b"e](");
    let two = two.event("alloc", 1, 3).op(b"ee").text("segments").op(b"]u.").0;
    let error = |device| within(&two, device, 1 << 20).unwrap_err().to_string();
    assert_eq!(
        error(None),
        "several devices have events: name one; it has 1 events of device 0, 1 events of device 1"
    );
    assert!(error(Some(2)).starts_with("there is no device 2"));
    assert_eq!(spell(&within(&two, Some(1), 1 << 20).unwrap().requests), "a0:3");
    let none =
        Pen::default().op(b"}(").text("device_traces").op(b"](]e").text("segments").op(b"]u.").0;
    assert!(parse(&none).unwrap_err().to_string().contains("_record_memory_history"));
}

/// Item 8: a trace of which a library only noted what it did is of no allocator.
#[test]
fn a_device_with_notes_alone_is_not_asked_about() {
    let noted = Pen::default().op(&[0x80, 4]).op(b"}(").text("device_traces").op(b"](](");
    let noted = noted.event("user_defined", 0, 0).event("user_defined", 0, 0).op(b"e](");
    let bytes = noted.event("alloc", 1, 3).op(b"ee").text("segments").op(b"]u.").0;
    let snapshot = parse(&bytes).unwrap();
    assert_eq!((snapshot.device, spell(&snapshot.requests).as_str()), (1, "a0:3"));
    let error = within(&bytes, Some(0), 1 << 20).unwrap_err().to_string();
    assert_eq!(error, "device 0 has no events; it has 1 events of device 1");
}

/// Item 16: what is wrong with a file is said in the words of what went wrong.
#[test]
fn files_without_a_trace_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("empty.pickle");
    std::fs::write(&path, b"").unwrap();
    let error = read(&path, None).unwrap_err().to_string();
    assert!(error.contains("empty file") && error.contains("not finished"), "{error}");
    // What torch.cuda.memory_snapshot() gives: segments alone; and the same in a dictionary.
    let segments = |pen: Pen| pen.op(b"](}").text("blocks").op(b"]s}").text("blocks").op(b"]se");
    let list = segments(Pen::default().op(&[0x80, 4])).op(b".").0;
    let held = segments(Pen::default().op(&[0x80, 4]).op(b"}").text("segments")).op(b"s.").0;
    for bytes in [list, held] {
        let error = parse(&bytes).unwrap_err().to_string();
        assert!(error.contains("record_memory_history was not on"), "{error}");
    }
}

/// Item 16: addresses above 2^63, as some drivers give them, in each way to write them.
#[test]
fn addresses_of_64_bits_are_read() {
    let high = (0x8001_0000_0000_0000_u64).cast_signed();
    let m = 2 << 20;
    let events = [("segment_alloc", high, m), ("alloc", high, 5), ("alloc", high + 512, 9)];
    let blocks: &[Block] = &[
        (high, 5, 512, "active_allocated"),
        (high + 512, 9, 512, "active_allocated"),
        (high + 1024, 0, m - 1024, "inactive"),
    ];
    let mut bytes = recorded(&events, &[(high, m, blocks)], None);
    // `Pen` writes eight bytes with a sign; Python writes nine where the first bit is set.
    let short: Vec<u8> = [&[0x8a, 8][..], &high.to_le_bytes()].concat();
    let long: Vec<u8> = [&[0x8a, 9][..], &high.to_le_bytes(), &[0]].concat();
    while let Some(at) = bytes.windows(short.len()).position(|w| w == short) {
        bytes.splice(at..at + short.len(), long.iter().copied());
    }
    let snapshot = parse(&bytes).unwrap();
    assert_eq!(spell(&snapshot.requests), "a0:5 a1:9");
    assert_eq!(snapshot.expected_reserved, Some(vec![m as u64; 2]));
}

#[test]
fn numbers_of_every_spelling() {
    let value = |code: &[u8]| {
        let bytes = [code, b"."].concat();
        Pickle::read(source(&bytes), &mut Budget::new(Bytes(10_000)), false).map(|p| p.root)
    };
    for (code, is) in [
        (&b"I01\n"[..], Value::Bool(true)),
        (b"I-7\n", Value::Int(-7)),
        (b"L9223372036854775807L\n", Value::Int(i64::MAX)),
        (b"L9223372036854775808L\n", Value::Int(i64::MIN)),
        (b"L18446744073709551616L\n", Value::Other),
        (b"L-9223372036854775809L\n", Value::Other),
        (b"F0.5\n", Value::Float(0.5)),
        (b"G\x3f\xe0\0\0\0\0\0\0", Value::Float(0.5)),
        (b"J\xff\xff\xff\xff", Value::Int(-1)),
        (b"\x8a\x00", Value::Int(0)),
        (b"\x8a\x02\x00\xff", Value::Int(-256)),
        (b"\x8a\x09\0\0\0\0\0\0\0\x80\0", Value::Int(i64::MIN)),
        (b"\x8a\x09\0\0\0\0\0\0\0\0\x01", Value::Other),
        (b"\x8b\x01\0\0\0\x7f", Value::Int(127)),
    ] {
        assert_eq!(value(code).unwrap(), is, "{code:?}");
    }
    for bad in [
        &b"I\n"[..],
        b"Lx\n",
        b"F,\n",
        b"\x8b\xff\xff\xff\xff",
        b"h\0",
        b"a",
        b"s",
        b"u",
        b"Ns",
        b"N(Nu",
        b"}(Nu",
        b"(",
        b"",
    ] {
        assert!(value(bad).is_err(), "{bad:?}");
    }
}

mod written {
    //! What [`super::super::write`] writes, read back.

    use super::super::write::{Event, Frame, Stacks, Target, write};
    use super::*;
    use crate::allocator::Config;
    use crate::allocator::replay::{LARGEST_DEVICE, observe};
    use crate::units::Nanos;

    const CONFS: [&str; 4] =
        ["", "expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:8"];

    fn snapshot_of(requests: &[Request], conf: &str, capacity: Bytes) -> Snapshot {
        let config: Config = conf.parse().unwrap();
        let mut stacks = Stacks::default();
        let stack = stacks.add(["mm", "linear"].map(|name| Frame {
            filename: "model.py".to_owned(),
            name: name.to_owned(),
            line: 7,
        }));
        let events = requests.iter().zip(0..).map(|(&request, at)| Event {
            request,
            time: Nanos(at * 1000),
            stack,
            category: (at % 3 == 0).then_some("activations"),
        });
        let mut bytes = Vec::new();
        let target = Target { config: &config, alloc_conf: conf, capacity };
        write(&mut bytes, &target, &stacks, events).unwrap();
        within(&bytes, None, 64 << 20).unwrap()
    }

    /// Blocks of all sizes that come and go, with the cache emptied now and then.
    fn busy(count: u32) -> Vec<Request> {
        let mut state = 7u64;
        let mut next = move |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        let (mut requests, mut live) = (Vec::new(), Vec::new());
        for id in 0..count {
            requests.push(Request::Allocate {
                id,
                bytes: Bytes(next(40) * next(1 << 20) + 1),
                stream: next(2) as u32,
            });
            live.push(id);
            while live.len() > 40 || live.len() > 5 && next(3) == 0 {
                let id = live.swap_remove(next(live.len() as u64) as usize);
                requests.push(Request::Free { id });
            }
            if next(200) == 0 {
                requests.push(Request::EmptyCache);
            }
        }
        requests
    }

    #[test]
    fn a_written_snapshot_reads_back_as_its_requests() {
        let requests = busy(2000);
        for conf in CONFS {
            let config: Config = conf.parse().unwrap();
            let mut reserved = Vec::new();
            observe(&requests, &config, LARGEST_DEVICE, None, |_, _, a| {
                reserved.push(a.stats().reserved.0);
            });
            let read = snapshot_of(&requests, conf, LARGEST_DEVICE);
            assert_eq!(read.settings.alloc_conf.as_deref(), Some(conf));
            // A cache that had nothing to give back leaves no trace.
            let moved =
                |i: &usize| requests[*i] != Request::EmptyCache || reserved[*i] != reserved[i - 1];
            let kept: Vec<usize> = (0..requests.len()).filter(moved).collect();
            let only = |all: &[u64]| kept.iter().map(|&i| all[i]).collect::<Vec<_>>();
            assert_eq!(read.requests.len(), kept.len(), "{conf}");
            assert_eq!(read.expected_reserved, Some(only(&reserved)), "{conf}");
            assert_eq!((read.at_start, read.failed.len()), (0, 0));
        }
    }

    #[test]
    fn failures_are_written_as_failures() {
        let requests = busy(300);
        let read = snapshot_of(&requests, "", Bytes(200 << 20));
        assert!(!read.failed.is_empty());
        assert_eq!(read.capacity, Some(Bytes(200 << 20)));
    }
}

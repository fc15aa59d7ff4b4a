//! Small traces, each with one irregularity of real traces.

use std::io::Write;
use std::path::{Path, PathBuf};

use super::*;

fn parsed(text: impl AsRef<[u8]>) -> Result<Trace, TraceError> {
    parse(text.as_ref(), Path::new("t.json"), &Limits::default())
}

/// Parses a trace of some events between a header like Kineto's and its end.
fn with_events(events: &str) -> Result<Trace, TraceError> {
    parsed(format!(
        "\n  {{\n \"schemaVersion\": 1,\n \"deviceProperties\": [\n ],\n \"traceEvents\": [\n{events}\n ],\n \"traceName\": \"x\"\n}}"
    ))
}

fn problem(result: Result<Trace, TraceError>) -> String {
    result.expect_err("refused").to_string()
}

const OP: &str = r#"{"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 7, "tid": 8, "ts": 100.250, "dur": 2.5, "args": {"Sequence number": 3, "Concrete Inputs": ["", "0.\""], "Input type": ["float", ""], "Input Strides": [[2, 1], []], "Input Dims": [[4, 2], []], "Ev Idx": 1}}"#;
const TAKE: &str = r#"{"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 7, "tid": 8, "ts": 101.001, "args": {"Total Allocated": 64, "Bytes": 64, "Device Id": -1, "Device Type": 0, "Addr": 140387366289472}}"#;

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fixtures/traces/tiny_cnn-adam-8-32-start.profile.json.gz")
}

#[test]
fn one_of_each() {
    let trace = with_events(&format!(
        r#"{TAKE},
        {OP},
        {{"ph": "X", "cat": "python_function", "name": "nn.Module: Conv2d_3", "pid": 7, "tid": 9, "ts": 100, "dur": 9, "args": {{}}}},
        {{"ph": "X", "cat": "python_function", "name": "f.py(3): f", "pid": 7, "tid": 10, "ts": 1, "dur": 9, "args": {{}}}},
        {{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#4", "pid": 7, "tid": 8, "ts": 100.1, "dur": 20}},
        {{"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": 1, "pid": 7, "tid": 8, "ts": 1}},
        {{"name": "process_name", "ph": "M", "ts": 1, "pid": 7, "tid": 0, "args": {{"name": "python"}}}}"#
    ))
    .unwrap();
    let [op] = trace.ops[..] else { panic!("{:?}", trace.ops) };
    assert_eq!(
        (op.start, op.end, trace.text(op.name), op.thread, op.sequence),
        (250, 2750, "aten::add", Thread(0), 3)
    );
    let args = trace.args[op.args as usize];
    let texts =
        [args.dims, args.strides, args.types, args.concrete].map(|t| trace.text(t.unwrap()));
    assert_eq!(texts, ["[[4, 2], []]", "[[2, 1], []]", r#"["float", ""]"#, r#"["", "0.\""]"#]);
    assert_eq!(
        trace.memory,
        [Memory {
            time: 1_001,
            address: 140_387_366_289_472,
            bytes: 64,
            thread: Thread(0),
            host: true
        }]
    );
    let [mark] = trace.marks[..] else { panic!("{:?}", trace.marks) };
    assert_eq!((mark.start, mark.end, trace.text(mark.name)), (100, 20_100, "ProfilerStep#4"));
    let [module] = trace.modules[..] else { panic!("{:?}", trace.modules) };
    assert_eq!(
        (module.start, module.end, trace.text(module.name), module.thread),
        (0, 9_000, "Conv2d_3", Thread(1))
    );
    assert_eq!(trace.notes, [""; 0]);
}

#[test]
fn the_fixture_is_read_in_order() {
    let trace = read(&fixture(), &Limits::default()).unwrap();
    assert_eq!(
        (trace.ops.len(), trace.memory.len(), trace.marks.len(), trace.modules.len()),
        (2_369, 1_564, 9, 66)
    );
    assert!(
        trace.ops.is_sorted_by_key(|o| (o.start, std::cmp::Reverse(o.end)))
            && trace.memory.is_sorted_by_key(|m| m.time)
    );
    assert_eq!(
        trace.marks.iter().filter(|m| trace.text(m.name).starts_with("ProfilerStep#")).count(),
        3
    );
    assert_eq!(trace.notes, [""; 0]);
}

#[test]
fn a_bare_list_strings_for_numbers_and_any_order_of_keys() {
    let trace = parsed(
        "\u{feff}[ null, 7, \"x\", {\"args\":{\"Addr\":\"0x10\",\"Bytes\":\"-512\",\"Device Type\":\"1\"},\"tid\":\"8\",\"ts\":\"5e3\",\"pid\":7,\"name\":\"[memory]\",\"cat\":\"\",\"ph\":\"i\"},,
         {\"ts\":\"5000.5\",\"tid\":8,\"pid\":\"7\",\"args\":null,\"name\":\"aten::\\u00e9\",\"cat\":\"cpu_op\",\"ph\":\"X\"}]trailing",
    )
    .unwrap();
    assert_eq!(
        trace.memory,
        [Memory { time: 0, address: 16, bytes: -512, thread: Thread(0), host: false }]
    );
    let op = trace.ops[0];
    assert_eq!(
        (op.start, op.end, trace.text(op.name), op.thread, op.sequence),
        (500, 500, "aten::é", Thread(0), -1)
    );
    assert_eq!(trace.args, [Args { dims: None, strides: None, types: None, concrete: None }]);
}

#[test]
fn strings_may_hold_anything() {
    let mut text = format!("[{TAKE},").into_bytes();
    text.extend_from_slice(b"{\"ph\":\"X\",\"cat\":\"cpu_op\",\"name\":\"a\x01\n{[\xff\\\"\",\"ts\":1},{\"ph\":\"X\",\"cat\":\"cpu_op\",\"name\":\"b\",\"ts\":2,\"name\":\"c\"}]");
    let trace = parsed(text).unwrap();
    assert_eq!(
        trace.ops.iter().map(|o| trace.text(o.name)).collect::<Vec<_>>(),
        ["a\u{1}\n{[\u{fffd}\"", "c"]
    );
}

#[test]
fn ties_keep_the_files_order_and_parents_come_first() {
    let at = |ts: &str, dur: &str, name: &str| {
        format!(r#"{{"ph":"X","cat":"cpu_op","name":"{name}","ts":{ts},"dur":{dur}}}"#)
    };
    let free = TAKE.replace(r#""Bytes": 64"#, r#""Bytes": -64"#);
    let early = TAKE.replace("101.001", "99");
    let trace = with_events(
        &[
            at("5", "1", "child"),
            at("5", "2", "parent"),
            at("4", "9", "first"),
            free,
            TAKE.to_owned(),
            early,
        ]
        .join(",\n"),
    )
    .unwrap();
    assert_eq!(
        trace.ops.iter().map(|o| trace.text(o.name)).collect::<Vec<_>>(),
        ["first", "parent", "child"]
    );
    assert_eq!(trace.memory.iter().map(|m| m.bytes).collect::<Vec<_>>(), [64, -64, 64]);
}

#[test]
fn begun_and_ended_events_pair_by_thread() {
    let at = |phase: &str, tid: u32, ts: u32, name: &str| {
        format!(
            r#"{{"ph":"{phase}","cat":"cpu_op","name":"{name}","pid":1,"tid":{tid},"ts":{ts}}}"#
        )
    };
    let other = r#"{"ph":"B","cat":"other","name":"o","pid":1,"tid":1,"ts":2}"#.to_owned();
    let end = |tid: u32, ts: u32| format!(r#"{{"ph":"E","pid":1,"tid":{tid},"ts":{ts}}}"#);
    let events = [
        at("B", 1, 1, "a"),
        other,
        at("B", 2, 3, "b"),
        at("B", 1, 4, "c"),
        end(1, 5),
        end(1, 6),
        end(1, 7),
        end(9, 7),
        TAKE.to_owned(),
    ];
    let trace = with_events(&events.join(",")).unwrap();
    let ops: Vec<_> = trace.ops.iter().map(|o| (trace.text(o.name), o.start, o.end)).collect();
    assert_eq!(ops, [("a", 0, 6_000), ("b", 2_000, 100_001), ("c", 3_000, 4_000)]);
    assert!(
        trace.notes[0].starts_with(
            "Events that begin and don't end were taken to last to the end of the trace: 1."
        ),
        "{:?}",
        trace.notes
    );
}

#[test]
fn old_categories_are_known() {
    let old = r#"{"ph":"X","cat":"Operator","name":"ProfilerStep#0","pid":1,"tid":1,"ts":1,"dur":5,"args":{}},
        {"ph":"X","cat":"Operator","name":"aten::mul","pid":1,"tid":1,"ts":2,"dur":1,"args":{"Device":1,"Input dims":[[1]]}}"#;
    let trace = with_events(&format!("{old},{TAKE}")).unwrap();
    assert_eq!((trace.marks.len(), trace.ops.len()), (1, 1));
    assert_eq!(trace.text(trace.args[0].dims.unwrap()), "[[1]]");
}

#[test]
fn a_cut_file_counts_as_far_as_it_goes() {
    let whole = format!("{{\"traceEvents\": [{TAKE}, {OP}, {OP}]}}");
    let first = whole.find(OP).unwrap();
    for cut in first + 1..whole.len() - 1 {
        let trace = parsed(&whole[..cut]).unwrap();
        let ops =
            usize::from(cut >= first + OP.len()) + usize::from(cut >= first + 2 * OP.len() + 2);
        let closed = cut == whole.len() - 1;
        assert_eq!(
            (trace.ops.len(), trace.memory.len(), trace.notes.len()),
            (ops, 1, usize::from(!closed)),
            "{cut}"
        );
        assert!(trace.notes[0].contains(&format!("ends at byte {cut},")), "{:?}", trace.notes);
        assert_eq!(trace.bytes, Bytes(cut as u64));
    }
    assert!(problem(parsed(&whole[..40])).contains("ends before any memory event"));
}

#[test]
fn a_cut_or_damaged_gzip_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.json.gz");
    let mut coder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    write!(coder, "[{TAKE}").unwrap();
    // Random names, which don't compress, so that the cut is within events.
    let mut state = 1u64;
    for i in 0..2_000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        write!(coder, r#",{{"ph":"X","cat":"cpu_op","name":"{state}","ts":{i}}}"#).unwrap();
    }
    write!(coder, "]").unwrap();
    let whole = coder.finish().unwrap();
    std::fs::write(&path, &whole).unwrap();
    assert_eq!(read(&path, &Limits::default()).unwrap().ops.len(), 2_000);
    std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    let trace = read(&path, &Limits::default()).unwrap();
    assert!(
        (500..1_500).contains(&trace.ops.len()) && trace.notes[0].contains("ends at byte"),
        "{:?}",
        trace.notes
    );
    let mut damaged = whole.clone();
    let half = whole.len() / 2;
    damaged[half..half + 64].fill(0xff);
    std::fs::write(&path, &damaged).unwrap();
    let trace = read(&path, &Limits::default()).unwrap();
    damaged[20..84].fill(0xff);
    std::fs::write(&path, &damaged).unwrap();
    assert!(problem(read(&path, &Limits::default())).contains("compression is damaged"));
    assert!(trace.ops.len() < 2_000 && !trace.notes.is_empty(), "{:?}", trace.notes);
}

#[test]
fn damaged_events_are_left_out_and_counted() {
    let unescaped = OP.replace("aten::add", "say \"hello\"");
    let trace = with_events(&format!("{OP}, {unescaped}, {OP} }} , {TAKE}")).unwrap();
    assert_eq!((trace.ops.len(), trace.memory.len()), (2, 1));
    assert!(trace.notes[0].contains("or nest too deep, were left out: 2, "), "{:?}", trace.notes);
    let deep = OP.replace("[[4, 2], []]", &("[".repeat(200) + &"]".repeat(200)));
    assert!(
        with_events(&format!("{deep},{TAKE}")).unwrap().notes[0]
            .starts_with("Events that are not JSON, or nest too deep, were left out: 1, ")
    );
    let all = vec![unescaped; 101].join(",");
    assert!(
        problem(with_events(&all)).contains("byte 114: is not JSON, here and in 101 events"),
        "{}",
        problem(with_events(&all))
    );
}

#[test]
fn unreadable_times_and_sizes_are_left_out_and_counted() {
    let bad = [
        OP.replace("100.250", "NaN"),
        TAKE.replace("\"Bytes\": 64", "\"Bytes\": Infinity"),
        TAKE.replace("140387366289472", "[1]"),
    ];
    let trace = with_events(&format!("{},{OP},{TAKE}", bad.join(","))).unwrap();
    assert_eq!((trace.ops.len(), trace.memory.len()), (1, 1));
    assert!(
        trace.notes[0]
            .starts_with("Events without a readable time, address or size were left out: 3, "),
        "{:?}",
        trace.notes
    );
}

#[test]
fn what_is_no_trace_is_refused_with_a_remedy() {
    for (text, at, remedy) in [
        ("", 0, "record the trace again"),
        ("  \n", 3, "record the trace again"),
        ("hello", 0, "export_chrome_trace"),
        ("{\"a\": [1, {}], \"b\": \"}\", \"c\": 1}", 31, "export_chrome_trace"),
        ("{\"a\": tru", 9, "record the trace again"),
        ("{1: 2}", 1, "record the trace again"),
        ("{\"a\" 2}", 5, "record the trace again"),
        ("[]", 2, "export_chrome_trace"),
        ("[{\"a\": 1}]", 10, "export_chrome_trace"),
        ("[{{{", 2, "is not JSON from here on"),
        ("{\"schema\": \"1.1.1-chakra.0.0.4\", \"nodes\": [{\"id\": 1}]}", 33, "neap import"),
        ("{\"schema\": 1, \"traceEvents\": 7}", 30, "export_chrome_trace"),
    ] {
        let message = problem(parsed(text));
        assert!(
            message.starts_with(&format!("t.json: byte {at}: ")) && message.contains(remedy),
            "{text}: {message}"
        );
    }
    assert!(problem(parsed(b"\x80\x02}")).contains("neap replay"));
    assert!(problem(with_events(OP)).contains("profile_memory=True"));
    let folder = tempfile::tempdir().unwrap();
    assert!(problem(read(folder.path(), &Limits::default())).contains("directory"));
    assert!(problem(read(&folder.path().join("none"), &Limits::default())).contains("none"));
}

#[test]
fn the_latest_iterations_are_left_out_when_there_are_too_many() {
    let mut events = Vec::new();
    for step in 0..10 {
        events.push(format!(
            r#"{{"ph":"X","cat":"user_annotation","name":"ProfilerStep#{step}","ts":{},"dur":99}}"#,
            step * 100
        ));
        events.extend((0..50).map(|i| {
            format!(r#"{{"ph":"X","cat":"cpu_op","name":"a","ts":{},"dur":1}}"#, step * 100 + i)
        }));
    }
    for step in 0..10 {
        events.extend((0..20).map(|i| TAKE.replace("101.001", &(step * 100 + i).to_string())));
    }
    let text = format!("[{}]", events.join(","));
    let one = 50 * size_of::<Op>() as u64 + size_of::<Mark>() as u64;
    let limits = Limits { records_bytes: one * 5, ..Limits::default() };
    let trace = parse(text.as_bytes(), Path::new("t.json"), &limits).unwrap();
    assert_eq!((trace.marks.len(), trace.ops.len(), trace.memory.len()), (2, 100, 40));
    assert!(
        trace.notes[0].contains("568 events that begin 200.00 µs or more after its start were left out (it lasts 999.00 µs)"),
        "{:?}",
        trace.notes
    );
    let limits = Limits { records_bytes: 200, ..Limits::default() };
    let late = format!("[{},{}]", events[..51].join(","), TAKE.replace("101.001", "2000"));
    let message = problem(parse(late.as_bytes(), Path::new("t.json"), &limits));
    assert!(message.contains("the first memory event comes after"), "{message}");
    let same = [OP; 10].join(",");
    assert!(
        problem(parse(format!("[{same}]").as_bytes(), Path::new("t.json"), &limits))
            .contains("at one instant")
    );
}

#[test]
fn different_texts_without_end_are_refused() {
    let events: Vec<_> =
        (0..1_000).map(|i| OP.replace("aten::add", &format!("aten::{i}"))).collect();
    let limits = Limits { texts_bytes: 20_000, ..Limits::default() };
    let message =
        problem(parse(format!("[{}]", events.join(",")).as_bytes(), Path::new("t.json"), &limits));
    assert!(
        message.contains("take more than") && message.contains("record fewer iterations"),
        "{message}"
    );
}

#[test]
fn long_events_are_stepped_over_without_a_buffer() {
    let long = OP.replace("\"Ev Idx\": 1", &format!("\"x\": \"{}\\\"}}\"", "y".repeat(100_000)));
    let limits = Limits { event_bytes: 2_000, ..Limits::default() };
    let text =
        format!("{{\"long\": \"{}\", \"traceEvents\": [{OP},{long},{TAKE}]}}", "z]".repeat(50_000));
    let trace = parse(text.as_bytes(), Path::new("t.json"), &limits).unwrap();
    assert_eq!((trace.ops.len(), trace.memory.len()), (1, 1));
    assert!(
        trace.notes[0].contains("Events longer than 2.0 KiB were left out: 1."),
        "{:?}",
        trace.notes
    );
}

/// A source that gives a few bytes at a time, as a pipe may.
struct Drip<'a>(&'a [u8], usize);

impl std::io::Read for Drip<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let n = self.1.min(buffer.len()).min(self.0.len());
        buffer[..n].copy_from_slice(&self.0[..n]);
        self.0 = &self.0[n..];
        Ok(n)
    }
}

#[test]
fn the_buffers_size_changes_nothing() {
    let mut text = Vec::new();
    std::io::Read::read_to_end(&mut crate::files::open(&fixture()).unwrap(), &mut text).unwrap();
    let whole = parsed(&text).unwrap();
    for (event_bytes, step) in [(30_000, 7), (30_011, 4_096), (1 << 20, 65_536)] {
        let trace = parse(
            Drip(&text, step),
            Path::new("t.json"),
            &Limits { event_bytes, ..Limits::default() },
        )
        .unwrap();
        assert_eq!(
            (&trace.ops, &trace.memory, &trace.modules, &trace.notes),
            (&whole.ops, &whole.memory, &whole.modules, &whole.notes)
        );
    }
}

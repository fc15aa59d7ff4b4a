use super::super::builtin;
use super::*;
use crate::device::latency::{Latency, Source, latencies};
use crate::job::{Dtype, Graph, Operand, Phase, Replay};
use crate::units::TensorId;

fn operand(shape: &[u64], stride: &[u64]) -> Operand {
    Operand {
        tensor: TensorId(0),
        version: 0,
        dtype: Dtype::F32,
        offset: 3,
        shape: shape.to_vec(),
        stride: stride.to_vec(),
    }
}

fn operator(kind: &str, args: Vec<Arg>) -> Operator {
    Operator {
        name: "o".to_owned(),
        kind: kind.to_owned(),
        phase: Phase::Forward,
        args,
        outputs: Vec::new(),
        hidden: Vec::new(),
        workspace: Bytes::ZERO,
        replay: Replay::Pure,
        random: false,
        ..Operator::default()
    }
}

fn sample() -> Operator {
    operator(
        "aten::mixed",
        vec![
            Arg::Tensor(operand(&[2, 3], &[3, 1])),
            Arg::Tensors(vec![Some(operand(&[3, 2], &[1, 3])), None]),
            Arg::Host { dtype: Dtype::F64, shape: Vec::new(), value: Some(0.5), input: None },
            Arg::None,
            Arg::Int(-1),
            Arg::Float(1e-5),
            Arg::Ints(vec![1, 2]),
            Arg::Bools(vec![true, false]),
            Arg::Text("ze\"ro,s".to_owned()),
        ],
    )
}

#[test]
fn a_key_says_kind_shapes_and_scalars_and_nothing_of_the_graph() {
    let text = r#"aten::mixed(f32[2,3],[f32[3,2]/[1,3],-],host f64[],-,-1,1e-5,[1,2],[true,false],"ze\"ro,s")"#;
    assert_eq!(key(&sample()), text);
    assert_eq!(key(&operator("aten::none", Vec::new())), "aten::none()");
}

#[test]
fn tables_round_trip_and_take_the_median() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.latency.csv");
    let rows: Vec<_> = [30, 10, 20, 1000].map(|ns| Row::new(&sample(), "host", Nanos(ns))).into();
    Table::write(&path, &rows).unwrap();
    let table = Table::read(&path).unwrap();
    assert_eq!(table.get(&key(&sample())), Some(Nanos(25)));
    assert_eq!(table.get("aten::mixed"), None);
    assert_eq!(table.devices().collect::<Vec<_>>(), ["host"]);
    Table::write(&path, &rows[..3]).unwrap();
    assert_eq!(Table::read(&path).unwrap().get(&key(&sample())), Some(Nanos(20)));
    assert_eq!(super::rows(&path).unwrap(), rows[..3], "all columns come back");
}

#[test]
fn rows_are_found_by_load_and_by_name() {
    let row = |name: &str, load_percent, ns| Row {
        operator: name.to_owned(),
        load_percent,
        ns,
        ..Row::new(&sample(), "host", Nanos(1))
    };
    let mut rows = vec![row("a", 0, 10), row("b", 0, 30), row("b", 60, 90), row("a", 60, 70)];
    rows[2].algorithm = "6;-1".to_owned();
    rows[2].workspace_bytes = Some(4096);
    let table = Table::of_rows(&rows);
    let named = |name: &str| Operator { name: name.to_owned(), ..sample() };
    assert_eq!(table.time(&named("a"), 0), Some(Nanos(10)));
    assert_eq!(table.time(&named("b"), 0), Some(Nanos(30)));
    assert_eq!(table.time(&named("c"), 0), Some(Nanos(20)), "the median of its key");
    assert_eq!(
        (table.time(&named("b"), 30), table.time(&named("b"), 31)),
        (Some(Nanos(30)), Some(Nanos(90)))
    );
    assert_eq!(table.time(&named("a"), 100), Some(Nanos(70)));
    assert_eq!(table.get(&key(&sample())), Some(Nanos(20)));
    assert_eq!(table.chosen(&key(&sample())), Chosen::read("6;-1", Bytes(4096)).as_ref());
    assert_eq!(table.chosen("x"), None);
}

#[test]
fn the_order_of_sources() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.csv");
    std::fs::write(&path, "ns, key\n77,aten::none()\n").unwrap();
    let table = Table::read(&path).unwrap();
    let mut written = operator("aten::none", Vec::new());
    written.duration_ns = Some(0);
    let graph = Graph {
        name: String::new(),
        tensors: Vec::new(),
        operators: vec![
            written,
            operator("aten::none", Vec::new()),
            operator("aten::other", Vec::new()),
        ],
        optimizer: None,
        loss: None,
        recorded_peak: None,
        origin: None,
    };
    let device = builtin::find("h100").unwrap();
    let found = latencies(&graph, &device, Some(&table));
    assert_eq!(found[0], Latency { time: Nanos(1), source: Source::Graph });
    assert_eq!(found[1], Latency { time: Nanos(77), source: Source::Measured });
    assert_eq!(found[2], Latency { time: Nanos(5_000), source: Source::Roofline });
    assert_eq!(latencies(&graph, &device, None)[1].source, Source::Roofline);
}

#[test]
fn bad_tables_name_line_and_column() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bad.csv");
    for (content, want) in [
        (&b""[..], "no column `key`"),
        (b"key,ns\n", "no rows"),
        (b"key,time\na,1\n", "line 1: the header has no column `ns`"),
        (b"key,ns,ns\na,1,2\n", "line 1: the header has `ns` twice"),
        (b"key,ns\na,1\nb,-1\n", "line 3: column `ns` is `-1`"),
        (b"key,ns\na,0\n", "line 2: column `ns` is `0`"),
        (b"key,ns\na,1.5\n", "line 2: column `ns` is `1.5`"),
        (b"key,ns\na,99999999999999999999\n", "line 2: column `ns`"),
        (b"key,ns\na,3600000000001\n", "line 2: column `ns`"),
        (b"key,ns,load_percent\na,1,101\n", "line 2: column `load_percent` is `101`"),
        (b"key,ns,flops\na,1,x\n", "line 2: column `flops` is `x`"),
        (b"key,ns,algorithm\na,1,winograd\n", "line 2: column `algorithm` is `winograd`"),
        (b"key,ns,workspace_bytes\na,1,99999999999999999999\n", "line 2: column `workspace_bytes`"),
        (b"key,ns\n,1\n", "line 2: column `key` is empty"),
        (b"key,ns\na,b,1\n", "line 2: it has 3 columns and the header 2"),
        (b"key,ns\n\xff,1\n", "line 2: column 1 is not UTF-8"),
    ] {
        std::fs::write(&path, content).unwrap();
        let error = Table::read(&path).unwrap_err().to_string();
        assert!(error.contains("bad.csv") && error.contains(want), "{error}");
    }
    assert!(Table::read(folder.path()).is_err());
}

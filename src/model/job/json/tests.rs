use proptest::prelude::*;

use super::*;
use crate::job::{Dtype, Group, Optimizer, Phase, Replay, Role};

fn from_text(text: &str) -> Result<Graph, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.graph.json");
    std::fs::write(&path, text).unwrap();
    read(&path).map_err(|e| e.to_string())
}

const SHORT: &str = r#"{"format":"neap.graph","version":1,"name":"short",
    "tensors":[{"name":"x","role":"input","dtype":"f32","shape":[2,3]},{"name":"y","role":"activation","dtype":"f16","shape":[3]}],
    "operators":[{"name":"o","args":[{"tensor":"x"},null,true,3,3.0,"text",[],[1,2],[1,2.5],[false],[null,{"tensor":"x","shape":[3],"offset":3}],
        {"host":"f64","shape":[],"value":2},{"float":"-inf"},{"floats":[]},{"tensors":[]},{"bools":[]},-7],"outputs":[{"tensor":"y"},null]}]}"#;

#[test]
fn the_short_form_means_the_defaults() {
    let graph = from_text(SHORT).unwrap();
    let o = &graph.operators[0];
    let x = Operand {
        tensor: TensorId(0),
        version: 0,
        dtype: Dtype::F32,
        offset: 0,
        shape: vec![2, 3],
        stride: vec![3, 1],
    };
    let row = Operand { offset: 3, shape: vec![3], stride: vec![1], ..x.clone() };
    assert_eq!((&*o.kind, o.phase, o.replay), ("custom", Phase::Forward, Replay::Pure));
    let expected = [
        Arg::Tensor(x),
        Arg::None,
        Arg::Bool(true),
        Arg::Int(3),
        Arg::Float(3.0),
        Arg::Text("text".to_owned()),
        Arg::Ints(vec![]),
        Arg::Ints(vec![1, 2]),
        Arg::Floats(vec![1.0, 2.5]),
        Arg::Bools(vec![false]),
        Arg::Tensors(vec![None, Some(row)]),
        Arg::Host { dtype: Dtype::F64, shape: vec![], value: Some(2.0), input: None },
        Arg::Float(f64::NEG_INFINITY),
        Arg::Floats(vec![]),
        Arg::Tensors(vec![]),
        Arg::Bools(vec![]),
        Arg::Int(-7),
    ];
    assert_eq!(o.args, expected);
    assert_eq!(graph.tensors[1].bytes, Bytes(6));
    let text = String::from_utf8(canonical(&graph)).unwrap();
    assert_eq!(from_text(&text).unwrap(), graph);
    assert_eq!(sha256(&graph), sha256(&from_text(&text).unwrap()));
}

#[test]
fn what_is_wrong_is_named() {
    for (from, to, expected) in [
        (
            "\"name\":\"short\"",
            "\"name\":\"short\",\"loss\":{\"tensor\":\"l\"}",
            "`loss`: there is no tensor named `l`",
        ),
        (
            "neap.graph",
            "neap.plan",
            "this is a `neap.plan` file, and a `neap.graph` file is expected",
        ),
        ("\"version\":1", "\"version\":3", "the file is of version 3"),
        ("\"name\":\"short\"", "\"nam\":\"short\"", "unknown field `nam`"),
        ("\"dtype\":\"f16\"", "\"dtype\":\"f17\"", "unknown variant `f17`"),
        ("\"shape\":[2,3]", "\"shape\":[2,-3]", "at line 2 column"),
        ("{\"tensor\":\"y\"}", "{\"tensor\":\"z\"}", "operator `o`: there is no tensor named `z`"),
        ("[1,2.5]", "[1,true]", "this one mixes them"),
        ("[1,2.5]", "[[[1]]]", "an entry of a list argument"),
        ("{\"float\":\"-inf\"}", "{\"float\":\"-inf\",\"shape\":[]}", "an argument object is"),
        ("{\"float\":\"-inf\"}", "{\"host\":\"f32\"}", "missing field `shape`"),
        ("{\"float\":\"-inf\"}", "{\"float\":0.5}", "any other number stands alone"),
        ("{\"float\":\"-inf\"}", "9223372036854775808", "beyond 64-bit"),
        ("\"outputs\"", "\"outputs\":[],\"outputs\"", "duplicate field"),
        ("null]}]}", "null]}", "cut off"),
        ("null]}]}", "null]}]}x", "not JSON"),
    ] {
        assert!(SHORT.contains(from), "{from}");
        let found = from_text(&SHORT.replacen(from, to, 1)).unwrap_err();
        assert!(found.contains(expected) && found.contains("x.graph.json"), "{found}\n{expected}");
    }
}

#[test]
fn hostile_gzip_fails_before_it_is_unpacked() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.graph.json");
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    for _ in 0..64 {
        gzip.write_all(&[b'['; 1 << 20]).unwrap();
    }
    let mut bytes = gzip.finish().unwrap();
    std::fs::write(&path, &bytes).unwrap();
    assert!(read(&path).unwrap_err().to_string().contains("line 1 column 2"));
    // A gzip file that is truncated in the middle.
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::none());
    gzip.write_all(SHORT.as_bytes()).unwrap();
    bytes = gzip.finish().unwrap();
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    assert!(read(&path).unwrap_err().to_string().contains("cut off or damaged"));
}

fn floats() -> impl Strategy<Value = f64> {
    // NaN is not equal to itself; a_nan_survives covers it.
    any::<f64>().prop_filter("a number", |x| !x.is_nan())
}

fn args() -> impl Strategy<Value = Arg> {
    let view = || {
        (0u64..3, 0u64..3, any::<bool>()).prop_map(|(rows, offset, broadcast)| Operand {
            tensor: TensorId(0),
            version: 0,
            dtype: if broadcast { Dtype::F32 } else { Dtype::F16 },
            offset,
            shape: vec![rows, 2],
            stride: if broadcast { vec![0, 1] } else { vec![2, 1] },
        })
    };
    prop_oneof![
        Just(Arg::None),
        view().prop_map(Arg::Tensor),
        prop::collection::vec(prop::option::of(view()), 0..3).prop_map(Arg::Tensors),
        (
            prop::option::of(floats()),
            prop::option::of(any::<u32>()),
            prop::collection::vec(0u64..9, 0..3)
        )
            .prop_map(|(value, input, shape)| Arg::Host {
                dtype: Dtype::Bf16,
                shape,
                value,
                input
            }),
        any::<i64>().prop_map(Arg::Int),
        floats().prop_map(Arg::Float),
        (-9i32..9).prop_map(|n| Arg::Float(n.into())),
        any::<bool>().prop_map(Arg::Bool),
        prop::collection::vec(any::<i64>(), 0..3).prop_map(Arg::Ints),
        prop::collection::vec(floats(), 0..3).prop_map(Arg::Floats),
        prop::collection::vec(any::<bool>(), 0..3).prop_map(Arg::Bools),
        any::<String>().prop_map(Arg::Text),
    ]
}

fn graphs() -> impl Strategy<Value = Graph> {
    let operator = (
        prop::collection::vec(args(), 0..4),
        any::<(bool, bool, bool)>(),
        0u64..2000,
        prop::option::of(0u64..1 << 50),
    );
    let optimizer = prop::option::of((
        any::<String>(),
        prop::collection::btree_map(any::<String>(), floats(), 0..3),
        any::<bool>(),
        prop::collection::btree_map("a|lr", prop::collection::vec(floats(), 0..2), 0..2),
    ));
    (prop::collection::vec(operator, 0..5), optimizer, any::<String>(), 16u64..20).prop_map(
        |(operators, optimizer, name, bytes)| {
            let tensor = |index: usize| Tensor {
                name: format!("\"t{index}\u{1}é"),
                bytes: Bytes(bytes),
                role: Role::Gradient,
                dtype: Dtype::F16,
                shape: vec![4, 2],
                kept_until: (index > 1).then_some(OpId(0)),
            };
            let tensors: Vec<_> = (0..=operators.len()).map(tensor).collect();
            let whole = |index: usize| Operand {
                tensor: TensorId::from_index(index),
                version: 0,
                dtype: Dtype::F16,
                offset: 0,
                shape: vec![4, 2],
                stride: vec![2, 1],
            };
            let grouped = optimizer.is_some();
            let list = operators.into_iter().enumerate().map(
                |(index, (args, (hidden, random, never), workspace, duration_ns))| Operator {
                    name: format!("o{index}"),
                    kind: "aten::x".to_owned(),
                    phase: Phase::Backward,
                    args: args
                        .into_iter()
                        .filter(|a| bytes == 16 || !matches!(a, Arg::None))
                        .collect(),
                    outputs: if hidden { vec![None] } else { vec![Some(whole(index + 1)), None] },
                    hidden: if hidden { vec![whole(index + 1)] } else { vec![] },
                    workspace: Bytes(workspace),
                    replay: if never { Replay::Never } else { Replay::SkipUpdates },
                    random,
                    duration_ns,
                    group: (grouped && workspace % 2 == 0).then_some(0),
                    module: (workspace % 3 == 0).then(|| format!("m.{index}")),
                },
            );
            let optimizer = optimizer.map(|(class, values, recovered, schedules)| {
                let group = Group { class, values, recovered, schedules };
                Optimizer { groups: vec![group; 1 + usize::from(recovered)] }
            });
            Graph::new(name, tensors, list.collect(), optimizer, Some(whole(0)), Some(Bytes(7)))
                .unwrap()
        },
    )
}

proptest! {
    #[test]
    fn what_is_written_reads_back_exactly(graph in graphs()) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.graph.json");
        write(&path, &graph).unwrap();
        let back = read(&path).unwrap();
        prop_assert_eq!(&back, &graph);
        prop_assert_eq!(std::fs::read(&path).unwrap(), canonical(&back));
    }

    #[test]
    fn damaged_text_never_panics(
        graph in graphs(),
        at in any::<prop::sample::Index>(),
        to in any::<u8>(),
    ) {
        let mut text = canonical(&graph);
        let at = at.index(text.len());
        text[at] = to;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.graph.json");
        std::fs::write(&path, text).unwrap();
        let _ = read(&path);
    }
}

#[test]
fn a_nan_survives() {
    let graph = from_text(&SHORT.replace("-inf", "nan")).unwrap();
    let again = from_text(std::str::from_utf8(&canonical(&graph)).unwrap()).unwrap();
    assert!(matches!(again.operators[0].args[12], Arg::Float(x) if x.is_nan()));
}

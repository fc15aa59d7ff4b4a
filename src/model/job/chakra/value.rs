//! Typed values of a Chakra trace.
//!
//! A node's parallel `values`, `shapes`, `types` and `strides` become [`Value`]s, and an operator's
//! schema becomes a [`Signature`].

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use crate::job::Dtype;
use crate::job::graph::contiguous;

/// The largest storage that is accepted: 1 PiB.
const LARGEST: u64 = 1 << 50;

/// A JSON value in little memory. The JSON reader limits its nesting.
#[derive(Debug, Default)]
pub(super) enum Raw {
    #[default]
    Null,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    List(Vec<Raw>),
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Raw;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }
            fn visit_unit<E>(self) -> Result<Raw, E> {
                Ok(Raw::Null)
            }
            fn visit_bool<E>(self, v: bool) -> Result<Raw, E> {
                Ok(Raw::Bool(v))
            }
            fn visit_i64<E>(self, v: i64) -> Result<Raw, E> {
                Ok(Raw::Int(v))
            }
            fn visit_u64<E>(self, v: u64) -> Result<Raw, E> {
                // Numbers above 2^63 are addresses, whose value is not used.
                Ok(i64::try_from(v).map_or(Raw::Float(v as f64), Raw::Int))
            }
            fn visit_f64<E>(self, v: f64) -> Result<Raw, E> {
                Ok(Raw::Float(v))
            }
            fn visit_str<E>(self, v: &str) -> Result<Raw, E> {
                Ok(Raw::Text(v.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Raw, A::Error> {
                let mut all = Vec::new();
                while let Some(v) = seq.next_element()? {
                    all.push(v);
                }
                Ok(Raw::List(all))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Raw, A::Error> {
                while map.next_entry::<String, Skip>()?.is_some() {}
                Ok(Raw::Null)
            }
        }
        deserializer.deserialize_any(Any)
    }
}

/// Any JSON value, dropped while it is read. (`IgnoredAny` has no depth limit and keeps a byte for
/// each level.)
pub(super) struct Skip;

impl<'de> Deserialize<'de> for Skip {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Skip;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }
            fn visit_unit<E>(self) -> Result<Skip, E> {
                Ok(Skip)
            }
            fn visit_bool<E>(self, _: bool) -> Result<Skip, E> {
                Ok(Skip)
            }
            fn visit_i64<E>(self, _: i64) -> Result<Skip, E> {
                Ok(Skip)
            }
            fn visit_u64<E>(self, _: u64) -> Result<Skip, E> {
                Ok(Skip)
            }
            fn visit_f64<E>(self, _: f64) -> Result<Skip, E> {
                Ok(Skip)
            }
            fn visit_str<E>(self, _: &str) -> Result<Skip, E> {
                Ok(Skip)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Skip, A::Error> {
                while seq.next_element::<Skip>()?.is_some() {}
                Ok(Skip)
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Skip, A::Error> {
                while map.next_entry::<Skip, Skip>()?.is_some() {}
                Ok(Skip)
            }
        }
        deserializer.deserialize_any(Any)
    }
}

/// One mention of a tensor.
#[derive(Clone, Debug)]
pub(super) struct View {
    /// The storage's id in the file: an address that several lives share.
    pub storage: u64,
    /// The life of that storage; filled in by [`super::storage`].
    pub life: u32,
    /// Whether it is in host memory.
    pub host: bool,
    pub dtype: Dtype,
    /// Offset of the first element, in recorded elements.
    pub offset: u64,
    pub shape: Vec<u64>,
    pub stride: Vec<u64>,
    /// One past the last byte of the storage that it can touch; 0 when it has no elements.
    pub end: u64,
}

/// One argument or result.
#[derive(Clone, Debug)]
pub(super) enum Value {
    None,
    Tensor(View),
    Tensors(Vec<Option<View>>),
    Int(i64),
    Float(f64),
    Bool(bool),
    Ints(Vec<i64>),
    Floats(Vec<f64>),
    Bools(Vec<bool>),
    Text(String),
}

impl Value {
    pub(super) fn views(&self) -> impl Iterator<Item = &View> {
        let (one, many) = match self {
            Self::Tensor(view) => (Some(view), &[][..]),
            Self::Tensors(list) => (None, &list[..]),
            _ => (None, &[][..]),
        };
        one.into_iter().chain(many.iter().flatten())
    }

    pub(super) fn views_mut(&mut self) -> impl Iterator<Item = &mut View> {
        let (one, many) = match self {
            Self::Tensor(view) => (Some(view), &mut [][..]),
            Self::Tensors(list) => (None, &mut list[..]),
            _ => (None, &mut [][..]),
        };
        one.into_iter().chain(many.iter_mut().flatten())
    }
}

/// The values of one side of a node. `is_host` says whether a device of this name is the host.
pub(super) fn values(raw: super::parse::Side) -> Result<Vec<Value>, String> {
    let n = raw.values.len();
    if raw.types.len() != n
        || raw.shapes.len() != n
        || (raw.strides.len() != n && !raw.strides.is_empty())
    {
        return Err(format!(
            "{n} values but {} types, {} shapes and {} strides",
            raw.types.len(),
            raw.shapes.len(),
            raw.strides.len()
        ));
    }
    let mut strides = raw.strides.into_iter();
    raw.values
        .into_iter()
        .zip(raw.shapes)
        .zip(raw.types)
        .map(|((v, shape), kind)| value(v, shape, strides.next(), &kind))
        .collect()
}

fn value(raw: Raw, shape: Raw, stride: Option<Raw>, kind: &str) -> Result<Value, String> {
    if kind.starts_with("Tensor(") {
        return Ok(view(raw, shape, stride, kind)?.map_or(Value::None, Value::Tensor));
    }
    Ok(match raw {
        Raw::Null => Value::None,
        Raw::Bool(v) => Value::Bool(v),
        Raw::Int(v) if kind == "Double" => Value::Float(v as f64),
        Raw::Int(v) => Value::Int(v),
        Raw::Float(v) => Value::Float(v),
        Raw::Text(v) if v == "<None>" || kind == "None" => Value::None,
        Raw::Text(v) if kind == "Double" => v.parse().map_or(Value::Text(v), Value::Float),
        Raw::Text(v) => Value::Text(v),
        Raw::List(items) => list(items, shape, stride, kind)?,
    })
}

fn list(items: Vec<Raw>, shape: Raw, stride: Option<Raw>, kind: &str) -> Result<Value, String> {
    let kinds =
        split(kind.strip_prefix("GenericList[").and_then(|k| k.strip_suffix(']')).unwrap_or(""));
    if kinds.iter().any(|k| k.starts_with("Tensor(")) {
        let mut shapes = many(shape).into_iter();
        let mut strides = stride.map(many).unwrap_or_default().into_iter();
        let views = items.into_iter().zip(kinds).map(|(item, kind)| {
            let (shape, stride) = (shapes.next().unwrap_or_default(), strides.next());
            if kind.starts_with("Tensor(") { view(item, shape, stride, kind) } else { Ok(None) }
        });
        return Ok(Value::Tensors(views.collect::<Result<_, _>>()?));
    }
    if !items.is_empty() && items.iter().all(|i| matches!(i, Raw::Bool(_))) {
        return Ok(Value::Bools(items.iter().map(|i| matches!(i, Raw::Bool(true))).collect()));
    }
    if kinds.first() != Some(&"Double") && items.iter().all(|i| matches!(i, Raw::Int(_))) {
        return Ok(Value::Ints(
            items.iter().map(|i| if let Raw::Int(v) = i { *v } else { 0 }).collect(),
        ));
    }
    let numbers: Option<Vec<f64>> = items
        .iter()
        .map(|i| match i {
            Raw::Int(v) => Some(*v as f64),
            Raw::Float(v) => Some(*v),
            Raw::Text(v) => v.parse().ok(),
            _ => None,
        })
        .collect();
    Ok(match numbers {
        Some(numbers) => Value::Floats(numbers),
        // Lists of lists and lists of texts. No operator that computes takes them, except lists of
        // absent tensors.
        None if items.iter().all(|i| matches!(i, Raw::Text(t) if t == "<None>")) => {
            Value::Tensors(vec![None; items.len()])
        }
        None => Value::Text(kind.to_owned()),
    })
}

fn many(raw: Raw) -> Vec<Raw> {
    if let Raw::List(items) = raw { items } else { Vec::new() }
}

/// Splits at commas outside brackets.
fn split(text: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0usize, 0);
    for (at, c) in text.char_indices() {
        match c {
            '[' | '(' | '<' => depth += 1,
            ']' | ')' | '>' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                parts.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    if !text[start..].trim().is_empty() {
        parts.push(text[start..].trim());
    }
    parts
}

/// `[tensor id, storage id, offset, elements, bytes per element, device]`; `None` when undefined.
fn view(raw: Raw, shape: Raw, stride: Option<Raw>, kind: &str) -> Result<Option<View>, String> {
    let Raw::List(parts) = raw else { return Ok(None) };
    let [
        Raw::Int(_),
        Raw::Int(storage),
        Raw::Int(offset),
        Raw::Int(elements),
        Raw::Int(item),
        Raw::Text(device),
    ] = &parts[..]
    else {
        return Err(
            "a tensor is not [tensor, storage, offset, elements, bytes per element, device]".into(),
        );
    };
    if device.is_empty() {
        return Ok(None);
    }
    let bad = |what: &str| format!("a tensor's {what} is negative or absurdly large");
    let natural = |v: i64, what: &str| {
        u64::try_from(v).ok().filter(|v| *v <= LARGEST).ok_or_else(|| bad(what))
    };
    let extents = |raw: Raw, what: &str| {
        many(raw)
            .iter()
            .map(|v| if let Raw::Int(v) = v { natural(*v, what) } else { Err(bad(what)) })
            .collect::<Result<Vec<u64>, _>>()
    };
    let (offset, elements, item) =
        (natural(*offset, "offset")?, natural(*elements, "size")?, natural(*item, "element size")?);
    let shape = extents(shape, "shape")?;
    let stride =
        stride.map(|s| extents(s, "stride")).transpose()?.filter(|s| s.len() == shape.len());
    let stride = stride.unwrap_or_else(|| contiguous(&shape));
    let product = shape
        .iter()
        .try_fold(1u64, |n, d| n.checked_mul(*d).filter(|n| *n <= LARGEST))
        .ok_or_else(|| bad("shape"))?;
    if product != elements {
        return Err(format!("a tensor of shape {shape:?} is said to have {elements} elements"));
    }
    let mut last = offset;
    for (n, step) in shape.iter().zip(&stride) {
        last = n
            .saturating_sub(1)
            .checked_mul(*step)
            .and_then(|x| last.checked_add(x))
            .ok_or_else(|| bad("stride"))?;
    }
    let dtype = dtype(kind, item)
        .ok_or_else(|| format!("element type `{kind}` of {item} bytes is not known"))?;
    let end = if elements == 0 {
        0
    } else {
        last.checked_add(1)
            .and_then(|n| n.checked_mul(dtype.size()))
            .ok_or_else(|| bad("extent"))?
    };
    if end > LARGEST {
        return Err(bad("extent"));
    }
    let host = device == "cpu" || device == "meta";
    Ok(Some(View {
        storage: *storage as u64,
        life: u32::MAX,
        host,
        dtype,
        offset,
        shape,
        stride,
        end,
    }))
}

fn dtype(kind: &str, item: u64) -> Option<Dtype> {
    let known = match kind.strip_prefix("Tensor(")?.strip_suffix(')')? {
        "float" => Dtype::F32,
        "double" => Dtype::F64,
        "c10::Half" => Dtype::F16,
        "c10::BFloat16" => Dtype::Bf16,
        "long int" | "long" | "int64_t" | "long long" => Dtype::I64,
        "int" => Dtype::I32,
        "short int" | "short" => Dtype::I16,
        "signed char" => Dtype::I8,
        "unsigned char" => Dtype::U8,
        "bool" => Dtype::Bool,
        "c10::complex<float>" => Dtype::C64,
        "c10::complex<double>" => Dtype::C128,
        // Float8, quantised and unsigned types: only their size matters for memory.
        _ => match item {
            1 => Dtype::U8,
            2 => Dtype::I16,
            4 => Dtype::I32,
            8 => Dtype::I64,
            _ => return None,
        },
    };
    (known.size() == item).then_some(known)
}

/// What an operator's schema says about its arguments.
#[derive(Debug, Default)]
pub(super) struct Signature {
    /// The name of each argument and whether it is written in place.
    pub arguments: Vec<(String, bool)>,
}

impl Signature {
    /// Reads `aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)`.
    pub(super) fn parse(schema: &str) -> Self {
        let Some(open) = schema.find('(') else { return Self::default() };
        let mut depth = 0usize;
        let close = schema[open..].char_indices().find_map(|(at, c)| {
            match c {
                '(' => depth += 1,
                ')' => depth -= 1,
                _ => {}
            }
            (depth == 0).then_some(open + at)
        });
        let inside = close.map_or("", |close| &schema[open + 1..close]);
        let argument = |text: &str| {
            let (kind, _) = text.split_once('=').unwrap_or((text, ""));
            (kind.rsplit(' ').next().unwrap_or("").to_owned(), kind.contains('!'))
        };
        Self { arguments: split(inside).into_iter().filter(|a| *a != "*").map(argument).collect() }
    }

    pub(super) fn position(&self, name: &str) -> Option<usize> {
        self.arguments.iter().position(|(n, _)| n == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_give_names_and_writes() {
        let s = Signature::parse(
            "aten::batch_norm(Tensor x, Tensor(a!)? m, *, float[2] e=[1, 2], Tensor(b!)[] out) -> (Tensor, Tensor)",
        );
        let expected = [("x", false), ("m", true), ("e", false), ("out", true)]
            .map(|(n, w)| (n.to_owned(), w));
        assert_eq!(s.arguments, expected);
        assert_eq!(Signature::parse("broken(").arguments, []);
    }

    #[test]
    fn impossible_tensors_are_refused() {
        let tensor = |n: i64, item: i64, offset: i64| {
            Raw::List(vec![
                Raw::Int(1),
                Raw::Int(2),
                Raw::Int(offset),
                Raw::Int(n),
                Raw::Int(item),
                Raw::Text("cuda:0".into()),
            ])
        };
        let shape = |n: i64| Raw::List(vec![Raw::Int(n)]);
        assert_eq!(
            view(tensor(3, 4, 1), shape(3), None, "Tensor(float)").unwrap().unwrap().end,
            16
        );
        assert!(view(tensor(3, 4, 1), shape(4), None, "Tensor(float)").is_err());
        assert!(view(tensor(-3, 4, 1), shape(-3), None, "Tensor(float)").is_err());
        assert!(view(tensor(1 << 49, 8, 1 << 49), shape(1 << 49), None, "Tensor(double)").is_err());
        assert!(view(tensor(3, 8, 1), shape(3), None, "Tensor(float)").is_err());
    }
}

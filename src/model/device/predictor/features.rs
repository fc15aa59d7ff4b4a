//! The features from which a predictor tells an operator's time, read from the operator's
//! [`key`](crate::device::latency::key).
//!
//! Training has only the rows of a table, so prediction reads the key as well. Arguments are named
//! `a0`, `a1`, … in schema order. A *number* is the logarithm of an extent (`a0.1`), of a
//! whole-number argument (`a6`, `a3.0`), or of the size of a list (`a0.count`, `a0.elements`). A
//! *word* is a property without degrees: a tensor's type, rank and order of strides
//! (`a1:f32r2/10`), a flag (`a5=true`), an absent argument (`a2-`). Floating-point arguments change
//! results but not the work, and are left out.

use std::collections::{BTreeMap, BTreeSet};

use super::math::ln;

/// The most arguments, list entries or dimensions of a key that is read.
const MOST: usize = 100_000;

/// The features of one operator under one load.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Features {
    /// Numbers by name, mostly logarithms.
    pub numbers: BTreeMap<String, f64>,
    /// The words that apply.
    pub words: BTreeSet<String>,
}

impl Features {
    /// Reads a key. `flops` and `bytes` are the roofline's counts. `None` when the key has another
    /// form.
    #[must_use]
    pub fn new(key: &str, flops: u128, bytes: u128, load_percent: u32) -> Option<Self> {
        let (_, arguments) = key.split_once('(')?;
        let mut reader = Reader { left: arguments, features: Self::default() };
        if !reader.take(")") {
            for index in 0..MOST {
                reader.argument(&format!("a{index}"))?;
                if !reader.take(",") {
                    break;
                }
            }
            if !reader.take(")") {
                return None;
            }
        }
        if !reader.left.is_empty() {
            return None;
        }
        let mut features = reader.features;
        features.numbers.insert("flops".to_owned(), ln(1.0 + flops as f64));
        features.numbers.insert("bytes".to_owned(), ln(1.0 + bytes as f64));
        features.numbers.insert("load".to_owned(), f64::from(load_percent.min(100)) / 100.0);
        Some(features)
    }
}

/// The kind that a key names.
#[must_use]
pub fn kind(key: &str) -> &str {
    key.split_once('(').map_or(key, |(kind, _)| kind)
}

struct Reader<'a> {
    left: &'a str,
    features: Features,
}

/// A type and a shape, and the strides where they are not those of a contiguous tensor.
struct Typed<'a> {
    dtype: &'a str,
    shape: Vec<f64>,
    order: String,
}

impl<'a> Reader<'a> {
    fn take(&mut self, text: &str) -> bool {
        self.left.strip_prefix(text).map(|left| self.left = left).is_some()
    }

    fn word(&mut self, word: String) {
        self.features.words.insert(word);
    }

    fn number(&mut self, name: String, value: f64) {
        self.features.numbers.insert(name, value);
    }

    fn argument(&mut self, name: &str) -> Option<()> {
        if self.left.starts_with('[') {
            return self.list(name);
        }
        if self.left.starts_with('"') {
            let text = self.text()?;
            self.word(format!("{name}={text}"));
        } else if self.take("host ") {
            let typed = self.typed()?;
            self.word(format!("{name}:host {}", typed.dtype));
        } else if self.is_typed() {
            let typed = self.typed()?;
            self.word(format!("{name}:{}r{}{}", typed.dtype, typed.shape.len(), typed.order));
            for (d, extent) in typed.shape.iter().enumerate() {
                self.number(format!("{name}.{d}"), ln(1.0 + extent));
            }
        } else {
            match self.scalar()? {
                Scalar::Nothing => self.word(format!("{name}-")),
                Scalar::Flag(flag) => self.word(format!("{name}={flag}")),
                Scalar::Whole(x) => self.number(name.to_owned(), signed(x)),
                Scalar::Real => {}
            }
        }
        Some(())
    }

    /// A list of numbers, flags, or tensors.
    fn list(&mut self, name: &str) -> Option<()> {
        self.take("[");
        let (mut flags, mut count, mut elements) = (String::new(), 0.0, 0.0);
        let mut types = BTreeSet::new();
        if self.take("]") {
            self.word(format!("{name}:[]"));
            return Some(());
        }
        for index in 0..MOST {
            if self.is_typed() {
                let typed = self.typed()?;
                types.insert(format!(
                    "{}{}",
                    typed.dtype,
                    if typed.order.is_empty() { "" } else { "/" }
                ));
                count += 1.0;
                elements += typed.shape.iter().product::<f64>();
            } else {
                match self.scalar()? {
                    Scalar::Nothing => drop(types.insert("-".to_owned())),
                    Scalar::Flag(flag) => flags.push(if flag { '1' } else { '0' }),
                    Scalar::Whole(x) => self.number(format!("{name}.{index}"), signed(x)),
                    Scalar::Real => {}
                }
            }
            if !self.take(",") {
                break;
            }
        }
        if !flags.is_empty() {
            self.word(format!("{name}={flags}"));
        }
        if count > 0.0 {
            self.number(format!("{name}.count"), ln(1.0 + count));
            self.number(format!("{name}.elements"), ln(1.0 + elements));
        }
        if !types.is_empty() {
            self.word(format!("{name}:[{}]", types.into_iter().collect::<Vec<_>>().join(" ")));
        }
        self.take("]").then_some(())
    }

    /// A quoted word, with its escapes as written.
    fn text(&mut self) -> Option<&'a str> {
        let inside = self.left.strip_prefix('"')?;
        let mut escaped = false;
        for (at, c) in inside.char_indices() {
            if c == '"' && !escaped {
                self.left = &inside[at + 1..];
                return Some(&inside[..at]);
            }
            escaped = c == '\\' && !escaped;
        }
        None
    }

    /// Whether a type and a shape follow: a letter, then letters and digits, then a bracket.
    fn is_typed(&self) -> bool {
        let end = self.left.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(self.left.len());
        self.left.starts_with(|c: char| c.is_ascii_lowercase()) && self.left[end..].starts_with('[')
    }

    fn typed(&mut self) -> Option<Typed<'a>> {
        let (dtype, rest) = self.left.split_once('[')?;
        self.left = rest;
        let shape = self.extents()?;
        let mut order = String::new();
        if self.take("/[") {
            let stride = self.extents()?;
            // The dimensions from the innermost outwards. A dimension that `expand` repeats has no
            // place.
            let mut by: Vec<usize> = (0..stride.len()).collect();
            by.sort_by(|&a, &b| stride[a].total_cmp(&stride[b]).then(b.cmp(&a)));
            order = by.iter().fold("/".to_owned(), |all, &d| {
                if stride[d] == 0.0 { format!("{all}x") } else { format!("{all}{d}") }
            });
        }
        Some(Typed { dtype, shape, order })
    }

    /// Whole numbers up to the closing bracket.
    fn extents(&mut self) -> Option<Vec<f64>> {
        let (inside, rest) = self.left.split_once(']')?;
        self.left = rest;
        if inside.is_empty() {
            return Some(Vec::new());
        }
        inside.split(',').map(|x| Some(x.parse::<u64>().ok()? as f64)).collect()
    }

    fn scalar(&mut self) -> Option<Scalar> {
        let end = self.left.find([',', ')', ']']).unwrap_or(self.left.len());
        let (text, rest) = self.left.split_at(end);
        self.left = rest;
        Some(match text {
            "-" => Scalar::Nothing,
            "true" => Scalar::Flag(true),
            "false" => Scalar::Flag(false),
            _ => match text.parse::<i64>() {
                Ok(x) => Scalar::Whole(x),
                Err(_) => text.parse::<f64>().ok().map(|_| Scalar::Real)?,
            },
        })
    }
}

enum Scalar {
    Nothing,
    Flag(bool),
    Whole(i64),
    Real,
}

fn signed(x: i64) -> f64 {
    let size = ln(1.0 + x.unsigned_abs() as f64);
    if x < 0 { -size } else { size }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_becomes_numbers_and_words() {
        let key = r#"aten::x(f32[2,3],f32[3,2]/[1,3],-,[f32[4],-,f32[5]/[2]],host f64[],-1,1e-5,[1,2],[true,false],"ze\"ro,s",[],true)"#;
        let f = Features::new(key, 0, 7, 50).unwrap();
        let words: Vec<&str> = f.words.iter().map(String::as_str).collect();
        let want = [
            "a0:f32r2",
            "a10:[]",
            "a11=true",
            "a1:f32r2/01",
            "a2-",
            "a3:[- f32 f32/]",
            "a4:host f64",
            "a8=10",
            "a9=ze\\\"ro,s",
        ];
        assert_eq!(words, want);
        let names: Vec<&str> = f.numbers.keys().map(String::as_str).collect();
        let want = [
            "a0.0",
            "a0.1",
            "a1.0",
            "a1.1",
            "a3.count",
            "a3.elements",
            "a5",
            "a7.0",
            "a7.1",
            "bytes",
            "flops",
            "load",
        ];
        assert_eq!(names, want);
        assert_eq!(
            (f.numbers["a5"], f.numbers["bytes"], f.numbers["load"]),
            (-ln(2.0), ln(8.0), 0.5)
        );
        assert_eq!(f.numbers["a3.elements"], ln(10.0));
        assert!(Features::new("aten::none()", 0, 0, 0).unwrap().words.is_empty());
        assert_eq!(kind(key), "aten::x");
    }

    #[test]
    fn what_is_no_key_is_not_read() {
        for bad in [
            "",
            "x",
            "x(",
            "x(f32[2)",
            "x(f32[a])",
            "x(\"a)",
            "x(1,)",
            "x(1)x",
            "x([1,2)",
            "x([[1],[2]])",
            "x(nonsense)",
            "x(f32[2]/[a])",
        ] {
            assert_eq!(Features::new(bad, 0, 0, 0), None, "{bad}");
        }
    }
}

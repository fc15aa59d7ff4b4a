//! The arguments of an operator, parsed from the trace's texts: shapes, strides, element sizes and
//! plain arguments. In a trace without `record_shapes` all fields are empty.

use serde_json::Value;

use super::trace::{Args, LARGEST_BLOCK, Text, Trace};

/// One tensor argument.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tensor {
    /// Its shape; empty for a scalar.
    pub dims: Vec<u64>,
    /// Its strides, in elements; empty where the trace has none.
    pub strides: Vec<u64>,
    /// Bytes of one element.
    pub element: u64,
    /// Whether its elements are integers or booleans.
    pub integral: bool,
}

impl Tensor {
    /// Whether the sizes are possible: at most [`LARGEST_BLOCK`] bytes, so that sums and products
    /// of a few sizes do not overflow.
    fn is_credible(&self) -> bool {
        let product = self.dims.iter().try_fold(self.element, |all, &d| all.checked_mul(d.max(1)));
        let strides = self.dims.iter().zip(&self.strides).map(|(&d, &s)| d.max(1).checked_mul(s));
        std::iter::once(product).chain(strides).all(|n| n.is_some_and(|n| n <= LARGEST_BLOCK))
    }

    /// The number of elements.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.dims.iter().fold(1, |a, &d| a.saturating_mul(d))
    }

    /// The bytes of its elements, packed.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.count().saturating_mul(self.element)
    }

    /// The bytes that its strides span, when the storage holds whole rows of the largest stride.
    #[must_use]
    pub fn span(&self) -> u64 {
        let whole = self
            .dims
            .iter()
            .zip(&self.strides)
            .map(|(&d, &s)| d.saturating_mul(s))
            .max()
            .unwrap_or(1);
        whole.max(1).saturating_mul(self.element)
    }

    /// Whether its elements are packed in the order of its dimensions.
    #[must_use]
    pub fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        for (&d, &s) in self.dims.iter().zip(&self.strides).rev() {
            if d != 1 && s != expected {
                return false;
            }
            expected = expected.saturating_mul(d);
        }
        true
    }
}

/// One argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// A tensor.
    Tensor(Tensor),
    /// A list of tensors.
    List(Vec<Tensor>),
    /// Anything else: a number, a list of numbers, a missing optional argument.
    Other,
}

/// All arguments of one call.
#[derive(Clone, Debug, Default)]
pub struct Inputs {
    /// In order.
    pub list: Vec<Input>,
    /// The plain arguments as text; `""` for tensors and missing arguments.
    pub plain: Vec<String>,
}

impl Inputs {
    /// Parses the texts of `args`. Texts that can't be parsed are left out.
    #[must_use]
    pub fn new(trace: &Trace, args: Args) -> Self {
        let column = |text: Option<Text>| -> Vec<Value> {
            text.and_then(|t| serde_json::from_str::<Value>(trace.text(t)).ok())
                .and_then(|v| if let Value::Array(a) = v { Some(a) } else { None })
                .unwrap_or_default()
        };
        let (dims, strides, types, plain) =
            (column(args.dims), column(args.strides), column(args.types), column(args.concrete));
        let tensor = |d: &Value, s: Option<&Value>, (element, integral): (u64, bool)| Tensor {
            dims: numbers(d),
            strides: s.map(numbers).unwrap_or_default(),
            element,
            integral,
        };
        let list = dims
            .iter()
            .enumerate()
            .map(|(i, d)| {
                let kind = types.get(i).and_then(Value::as_str).unwrap_or("");
                let nested = d.as_array().is_some_and(|a| a.iter().any(Value::is_array));
                if nested {
                    let each = d.as_array().map(Vec::as_slice).unwrap_or_default();
                    let strides = strides.get(i).and_then(Value::as_array);
                    // Older traces don't record a list's element type; single precision is usual in
                    // training.
                    let element = element(kind).unwrap_or((4, false));
                    let each = each
                        .iter()
                        .enumerate()
                        .map(|(j, d)| tensor(d, strides.and_then(|s| s.get(j)), element));
                    return Input::List(each.filter(Tensor::is_credible).collect());
                }
                let one = element(kind)
                    .map(|element| tensor(d, strides.get(i), element))
                    .filter(Tensor::is_credible);
                one.map_or(Input::Other, Input::Tensor)
            })
            .collect();
        let plain = plain
            .into_iter()
            .map(|v| if let Value::String(s) = v { s } else { v.to_string() })
            .collect();
        Self { list, plain }
    }

    /// The tensor at position `index`, if there is one.
    #[must_use]
    pub fn tensor(&self, index: usize) -> Option<&Tensor> {
        if let Some(Input::Tensor(t)) = self.list.get(index) { Some(t) } else { None }
    }

    /// The list of integers at position `index`, such as dimensions or an output mask of booleans.
    #[must_use]
    pub fn integers(&self, index: usize) -> Option<Vec<i64>> {
        let text = self.plain.get(index)?.trim();
        let inner = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(text);
        if inner.is_empty() {
            return text.starts_with('[').then(Vec::new);
        }
        inner
            .split(',')
            .map(|w| match w.trim() {
                "True" | "true" => Some(1),
                "False" | "false" => Some(0),
                n => n.parse().ok(),
            })
            .collect()
    }

    /// The number at position `index`.
    #[must_use]
    pub fn number(&self, index: usize) -> Option<f64> {
        self.plain.get(index)?.trim().trim_end_matches('.').parse().ok()
    }

    /// Whether the argument at position `index` says `True`.
    #[must_use]
    pub fn is_true(&self, index: usize) -> bool {
        self.plain.get(index).is_some_and(|t| t.trim() == "True")
    }
}

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().map(|a| a.iter().filter_map(Value::as_u64).collect()).unwrap_or_default()
}

/// Bytes of an element of a type that the profiler names, and whether it is integral. `None` for
/// names that are no tensor type.
fn element(kind: &str) -> Option<(u64, bool)> {
    Some(match kind {
        "float" | "c10::complex<c10::Half>" => (4, false),
        "int" | "unsigned int" => (4, true),
        "double" | "c10::complex<float>" => (8, false),
        "long int" | "long" | "unsigned long" => (8, true),
        "c10::complex<double>" => (16, false),
        "c10::Half" | "c10::BFloat16" => (2, false),
        "short int" | "short" | "unsigned short" => (2, true),
        "bool" | "unsigned char" | "signed char" | "char" => (1, true),
        k if k.starts_with("c10::Float8") => (1, false),
        _ => return None,
    })
}

//! Trains a predictor from a table of measurements, and measures its error on shapes that it did
//! not see.
//!
//! One shape in five, chosen by the hash of its key, is kept out of training under every load,
//! unless it is the only one of its form (types, flags, ranks).

use std::collections::{BTreeMap, BTreeSet};

use super::features::{self, Features};
use super::line::{self, Line};
use super::math::ln;
use super::{Fit, HeldOut, Model, Number, Predictor, network};
use crate::device::table::{Row, median};
use crate::units::{Nanos, mix};

/// The fewest shapes of a kind for a model: fewer are not enough both to train and to test.
pub const FEWEST: usize = 20;

/// One shape in this many is kept out of training.
const HELD_OUT: u64 = 5;

/// How to train.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Training steps, of 16 rows each.
    pub steps: u32,
    /// Seed of the first weights and of the order of rows.
    pub seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { steps: 3000, seed: 0 }
    }
}

/// The result of training.
#[derive(Clone, Debug)]
pub struct Trained {
    /// The models of the kinds that have enough shapes.
    pub predictor: Predictor,
    /// Kinds that have too few shapes, and how many they have.
    pub too_few: Vec<(String, usize)>,
    /// The fit over the held-out shapes of all kinds together.
    pub fit: Option<Fit>,
    /// Number of rows without the roofline's counts, or with a key of another form.
    pub unread: usize,
}

/// Why there is no predictor.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum TrainError {
    /// The rows were measured on several devices.
    #[error("its rows are of several devices ({}); a predictor is of one: keep one device's rows", .0.join(", "))]
    Devices(Vec<String>),
    /// No kind has enough rows.
    #[error("no kind of operator has {FEWEST} shapes with `flops` and `bytes`{}; `neap profile --sweep KIND` gathers them", most(.0))]
    TooFew(Option<(String, usize)>),
}

fn most(of: &Option<(String, usize)>) -> String {
    of.as_ref().map_or_else(String::new, |(kind, shapes)| format!("; `{kind}` has most, {shapes}"))
}

/// One shape under one load.
struct Sample<'a> {
    key: &'a str,
    features: Features,
    ns: u64,
    roofline: Option<u64>,
}

/// Rows of one key under one load.
#[derive(Default)]
struct Rows {
    ns: Vec<u64>,
    counts: Option<(u64, u64)>,
    roofline: Option<u64>,
}

/// Fits a model to each kind that has enough shapes.
///
/// # Errors
/// When rows are of several devices, or no kind has enough shapes.
pub fn fit(rows: &[Row], options: &Options) -> Result<Trained, TrainError> {
    let devices: BTreeSet<&str> =
        rows.iter().map(|r| r.device.as_str()).filter(|d| !d.is_empty()).collect();
    if devices.len() > 1 {
        return Err(TrainError::Devices(devices.into_iter().map(str::to_owned).collect()));
    }
    let mut kinds: BTreeMap<&str, BTreeMap<(&str, u32), Rows>> = BTreeMap::new();
    for row in rows {
        let of = kinds
            .entry(features::kind(&row.key))
            .or_default()
            .entry((&row.key, row.load_percent))
            .or_default();
        of.ns.push(row.ns);
        of.counts = of.counts.or(row.flops.zip(row.bytes));
        of.roofline = of.roofline.or(row.roofline_ns);
    }
    let (mut models, mut too_few, mut unread) = (Vec::new(), Vec::new(), 0);
    let mut answered: Vec<(u64, u64)> = Vec::new();
    for (kind, keys) in kinds {
        let mut samples = Vec::with_capacity(keys.len());
        for ((key, load), rows) in keys {
            let count = rows.ns.len();
            let features = rows
                .counts
                .and_then(|(flops, bytes)| Features::new(key, flops.into(), bytes.into(), load));
            match features {
                Some(features) => samples.push(Sample {
                    key,
                    features,
                    ns: median(rows.ns),
                    roofline: rows.roofline,
                }),
                None => unread += count,
            }
        }
        let shapes = samples.iter().map(|s| s.key).collect::<BTreeSet<_>>().len();
        let model = if shapes < FEWEST { None } else { model(kind, &samples, options) };
        match model {
            Some((model, of_kind)) => {
                models.push(model);
                answered.extend(of_kind);
            }
            None => too_few.push((kind.to_owned(), shapes)),
        }
    }
    if models.is_empty() {
        return Err(TrainError::TooFew(too_few.into_iter().max_by_key(|k| k.1)));
    }
    let device = devices.into_iter().next().unwrap_or_default().to_owned();
    let predictor = Predictor::new(device, models);
    Ok(Trained { predictor, too_few, fit: fit_of(&answered), unread })
}

/// A shape's hash, the same on every machine.
fn hash(key: &str) -> u64 {
    key.bytes().fold(0, |hash, byte| mix(hash ^ u64::from(byte)))
}

/// The model of a kind, and for each shape that it did not see the predicted and the measured time.
fn model(
    kind: &str,
    samples: &[Sample<'_>],
    options: &Options,
) -> Option<(Model, Vec<(u64, u64)>)> {
    let (held_out, mut seen): (Vec<&Sample<'_>>, Vec<&Sample<'_>>) =
        samples.iter().partition(|s| hash(s.key).is_multiple_of(HELD_OUT));
    // A form of the operator that no other row has is learned, so that the model covers it.
    let words: BTreeSet<&String> = seen.iter().flat_map(|s| &s.features.words).collect();
    let names: BTreeSet<&String> = seen.iter().flat_map(|s| s.features.numbers.keys()).collect();
    let (test, rare): (Vec<&Sample<'_>>, Vec<&Sample<'_>>) = held_out.into_iter().partition(|s| {
        s.features.words.iter().all(|word| words.contains(word))
            && s.features.numbers.keys().all(|name| names.contains(name))
    });
    seen.extend(rare);
    if test.is_empty() || seen.is_empty() {
        return None;
    }
    let mut always = seen[0].features.words.clone();
    let mut sometimes: BTreeSet<String> = BTreeSet::new();
    let mut values: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for sample in &seen {
        always.retain(|word| sample.features.words.contains(word));
        sometimes.extend(sample.features.words.iter().cloned());
        for (name, &value) in &sample.features.numbers {
            values.entry(name).or_default().push(value);
        }
    }
    let sometimes: Vec<String> = sometimes.difference(&always).cloned().collect();
    let numbers: Vec<Number> = values.into_iter().map(|(name, all)| number(name, &all)).collect();
    let measured: Vec<(f64, f64)> =
        seen.iter().map(|s| (line::bytes(&s.features), s.ns.max(1) as f64)).collect();
    let line = Line::fit(&measured);
    let base = |s: &Sample<'_>| line.map_or(0.0, |line| ln(line.predict(&s.features)));
    let logarithms: Vec<f64> = seen.iter().map(|s| ln(s.ns as f64) - base(s)).collect();
    let mut answer = number("ns", &logarithms);
    if answer.scale == 0.0 {
        answer.scale = 1.0;
    }
    let held_out = HeldOut {
        rows: 0,
        covered: 0,
        median_error_per_mille: 0,
        p90_error_per_mille: 0,
        roofline_median_error_per_mille: None,
        fit: None,
    };
    let mut model = Model {
        kind: kind.to_owned(),
        rows: seen.len() as u64,
        held_out,
        always,
        sometimes,
        numbers,
        line,
        answer,
        layers: Vec::new(),
    };
    // An input that varies among the rows is always within the range of the same rows.
    let inputs: Vec<Vec<f64>> = seen.iter().filter_map(|s| model.inputs(&s.features)).collect();
    let targets: Vec<f64> =
        logarithms.iter().map(|x| (x - model.answer.mean) / model.answer.scale).collect();
    model.layers = network::train(&inputs, &targets, options.steps, options.seed);
    let answered;
    (model.held_out, answered) = held_out_errors(&model, &test);
    Some((model, answered))
}

/// How well predicted times fit measured ones, by their logarithms.
fn fit_of(answered: &[(u64, u64)]) -> Option<Fit> {
    let logarithms: Vec<(f64, f64)> =
        answered.iter().map(|(said, of)| (ln(*said as f64), ln(*of as f64))).collect();
    let count = logarithms.len() as f64;
    let mean = logarithms.iter().map(|(_, of)| of).sum::<f64>() / count;
    let wrong: f64 = logarithms.iter().map(|(said, of)| (said - of) * (said - of)).sum();
    let varied: f64 = logarithms.iter().map(|(_, of)| (of - mean) * (of - mean)).sum();
    if varied.is_nan() || varied <= 0.0 {
        return None;
    }
    #[expect(clippy::cast_possible_truncation, reason = "a float saturates")]
    #[expect(clippy::cast_sign_loss, reason = "a sum of squares")]
    Some(Fit {
        r2_per_mille: ((1.0 - wrong / varied) * 1e3).round() as i64,
        mse_millionths: (wrong / count * 1e6).round() as u64,
    })
}

fn number(name: &str, all: &[f64]) -> Number {
    let count = all.len() as f64;
    let mean = all.iter().sum::<f64>() / count;
    let (low, high) =
        all.iter().fold((all[0], all[0]), |(low, high), &x| (low.min(x), high.max(x)));
    let scale = if high > low {
        (all.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / count).sqrt()
    } else {
        0.0
    };
    Number { name: name.to_owned(), mean, scale, low, high }
}

fn held_out_errors(model: &Model, test: &[&Sample<'_>]) -> (HeldOut, Vec<(u64, u64)>) {
    let error = |said: u64, of: u64| {
        u64::try_from(u128::from(said.abs_diff(of)) * 1000 / u128::from(of.max(1)))
            .unwrap_or(u64::MAX)
    };
    let predicted: Vec<Option<Nanos>> = test.iter().map(|s| model.predict(&s.features)).collect();
    let roofline: Vec<u64> = test.iter().filter_map(|s| Some(error(s.roofline?, s.ns))).collect();
    let answered = |(sample, said): (&&Sample<'_>, &Option<Nanos>)| {
        Some((said.map(|n| n.0).or(sample.roofline)?, sample.ns))
    };
    let answered: Vec<(u64, u64)> = test.iter().zip(&predicted).filter_map(answered).collect();
    let mut errors: Vec<u64> = answered.iter().map(|(said, of)| error(*said, *of)).collect();
    errors.sort_unstable();
    let held_out = HeldOut {
        rows: test.len() as u64,
        covered: predicted.iter().flatten().count() as u64,
        median_error_per_mille: if errors.is_empty() { 0 } else { median(errors.clone()) },
        p90_error_per_mille: errors
            .get((errors.len() * 9).div_ceil(10).saturating_sub(1))
            .copied()
            .unwrap_or(0),
        roofline_median_error_per_mille: (!roofline.is_empty()).then(|| median(roofline)),
        fit: fit_of(&answered),
    };
    (held_out, answered)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::latency::{Source, Sources, latencies_from};
    use crate::job::{Arg, Dtype, Graph, Operand, Operator, Phase, Replay};
    use crate::units::{Bytes, TensorId};

    fn product(m: u64, k: u64, n: u64) -> Operator {
        let view = |shape: [u64; 2], tensor| Operand {
            tensor: TensorId(tensor),
            version: 0,
            dtype: Dtype::F32,
            offset: 0,
            shape: shape.to_vec(),
            stride: vec![shape[1], 1],
        };
        Operator {
            name: format!("mm_{m}_{k}_{n}"),
            kind: "aten::mm".to_owned(),
            phase: Phase::Forward,
            args: vec![Arg::Tensor(view([m, k], 0)), Arg::Tensor(view([k, n], 1))],
            outputs: vec![Some(view([m, n], 2))],
            hidden: Vec::new(),
            workspace: Bytes::ZERO,
            replay: Replay::Pure,
            random: false,
            ..Operator::default()
        }
    }

    /// A machine that is slower at thin products than any roofline predicts.
    fn table() -> Vec<Row> {
        let mut rows = Vec::new();
        for i in 0..60u64 {
            let extent = |salt: u64| 8 << (mix(i * 3 + salt) % 7);
            let operator = product(extent(0), extent(1), extent(2));
            let (m, k, n) = (extent(0), extent(1), extent(2));
            let ns = 2000 + 2 * m * k * n / 20 + 3 * m * k;
            rows.push(Row {
                roofline_ns: Some(1 + m * k * n / 25),
                ..Row::new(&operator, "host", Nanos(ns))
            });
        }
        rows
    }

    #[test]
    fn learns_what_the_roofline_does_not_know() {
        let trained = fit(&table(), &Options { steps: 500, seed: 0 }).unwrap();
        let model = trained.predictor.model("aten::mm").unwrap();
        let errors = model.held_out;
        assert!(errors.rows >= 5 && errors.covered > 0, "{errors:?}");
        let roofline = errors.roofline_median_error_per_mille.unwrap();
        assert!(
            errors.median_error_per_mille < 150 && errors.median_error_per_mille * 2 < roofline,
            "{errors:?}"
        );

        // Of one kind alone, all kinds fit as well as that one.
        let fit = errors.fit.unwrap();
        assert_eq!(trained.fit, Some(fit));
        assert!(fit.r2_per_mille > 900 && fit.r2_per_mille <= 1000, "{fit:?}");

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.predictor.json");
        trained.predictor.write(&path).unwrap();
        let read = Predictor::read(&path).unwrap();
        assert_eq!(read, trained.predictor, "to the bit");

        let near = product(100, 100, 100);
        let time = read.predict(&near, 0).unwrap().0;
        let really = 2000 + 2 * 1_000_000 / 20 + 30_000;
        assert!(time.abs_diff(really) * 10 < really * 4, "{time}, really {really}");
        assert_eq!(read.predict(&near, 50), None, "no row was under load");
        assert_eq!(read.predict(&product(100_000, 100, 100), 0), None, "far beyond the rows");
        let mut other = near.clone();
        other.kind = "aten::bmm".to_owned();
        assert_eq!(read.predict(&other, 0), None);
        let mut transposed = near.clone();
        if let Arg::Tensor(view) = &mut transposed.args[0] {
            view.stride = vec![1, 100];
        }
        assert_eq!(read.predict(&transposed, 0), None, "a word that no row had");

        let graph = Graph {
            name: String::new(),
            tensors: Vec::new(),
            operators: vec![near, other],
            optimizer: None,
            loss: None,
            recorded_peak: None,
            origin: None,
        };
        let device = crate::device::builtin::find("host").unwrap();
        let sources = Sources { predictor: Some(&read), ..Sources::default() };
        let found: Vec<Source> =
            latencies_from(&graph, &device, &sources).iter().map(|l| l.source).collect();
        assert_eq!(found, [Source::Predicted, Source::Roofline]);
    }

    #[test]
    fn the_fit_is_that_of_logarithms() {
        let exact = [(1, 1), (10, 10), (100, 100)];
        assert_eq!(fit_of(&exact), Some(Fit { r2_per_mille: 1000, mse_millionths: 0 }));
        // Each is wrong by a factor of e², and their mean would be as wrong as that.
        let wrong = fit_of(&[(7389, 1000), (135_335, 1_000_000)]).unwrap();
        assert!(wrong.mse_millionths.abs_diff(4_000_000) < 100, "{wrong:?}");
        assert_eq!(fit_of(&[(5, 7), (6, 7)]), None);
        assert_eq!(fit_of(&[]), None);
    }

    #[test]
    fn too_little_to_learn_from_is_said() {
        let rows = table();
        assert_eq!(
            fit(&rows[..10], &Options::default()).unwrap_err(),
            TrainError::TooFew(Some(("aten::mm".to_owned(), 10)))
        );
        let mut mixed = rows.clone();
        mixed[3].device = "h100".to_owned();
        assert!(fit(&mixed, &Options::default()).unwrap_err().to_string().contains("h100, host"));
        let bare: Vec<Row> = rows.iter().map(|r| Row { flops: None, ..r.clone() }).collect();
        assert!(fit(&bare, &Options::default()).is_err());
    }

    #[test]
    fn bad_predictors_are_refused_with_file_and_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.predictor.json");
        fit(&table(), &Options { steps: 1, seed: 0 }).unwrap().predictor.write(&path).unwrap();
        let good = std::fs::read_to_string(&path).unwrap();
        for (from, to, want) in [
            ("neap.predictor", "neap.plan", "neap.plan"),
            ("\"version\":1", "\"version\":2", "\"version\": 2"),
            ("\"a0.0\"", "\"z\"", "sorted"),
            ("\"bias\":[", "\"bias\":[0.5,", "biases"),
            ("\"bias\":[", "\"bias\":[1e39,", "out of range"),
            ("\"scale\":", "\"scale\":-", "impossible"),
            ("\"kind\"", "\"sort\"", "sort"),
            ("}\n", "", "EOF"),
        ] {
            let bad = good.replacen(from, to, 1);
            assert_ne!(bad, good, "{from}");
            std::fs::write(&path, bad).unwrap();
            let error = Predictor::read(&path).unwrap_err().to_string();
            assert!(error.contains("x.predictor.json") && error.contains(want), "{error}");
        }
    }
}

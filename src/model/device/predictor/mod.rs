//! A learned predictor of latencies for operators that no table covers: TENSILE's cold start
//! (section IV-A of the paper).
//!
//! Each kind of operator has a network of four layers ([`network`]). Its inputs are the load and
//! the logarithms of extents, arguments and the roofline's counts ([`features`]). A model answers
//! only for operators like its rows: every word of the operator was seen, and every number lies
//! within the rows' range or at most a factor of two beyond. Predictions are rounded to whole
//! nanoseconds and do not depend on the machine's maths library ([`math`]), so plans made with them
//! are the same on every machine.

pub mod features;
pub mod line;
pub mod math;
pub mod network;
pub mod train;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::figure::LONGEST;
use super::key::key;
use super::roofline;
use crate::files::{self, FileError};
use crate::job::Operator;
use crate::units::Nanos;
use features::Features;
use line::Line;
use network::Layer;

const FORMAT: &str = "neap.predictor";
const VERSION: u32 = 1;

/// The largest file that is read, far above any predictor.
const LARGEST_FILE: u64 = 64 << 20;

/// How far beyond the rows' range a number may lie, as a logarithm: a factor of two.
const BEYOND: f64 = std::f64::consts::LN_2;

/// A `*.predictor.json` file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Predictor {
    /// `neap.predictor`.
    pub format: String,
    /// 1.
    pub version: u32,
    /// The device whose measurements it learned.
    pub device: String,
    /// One model for each kind, sorted by kind.
    pub models: Vec<Model>,
}

/// A model of one kind of operator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// The operator's kind, such as `aten::conv2d`.
    pub kind: String,
    /// How many pairs of shape and load it learned from.
    pub rows: u64,
    /// Its errors on shapes that it did not learn from.
    pub held_out: HeldOut,
    /// Words that every row had; an operator without one of them is not covered.
    pub always: BTreeSet<String>,
    /// Words that some rows had. They are inputs that follow the numbers.
    pub sometimes: Vec<String>,
    /// Numbers that the rows had. Those that vary are inputs.
    pub numbers: Vec<Number>,
    /// The time by bytes, for kinds that it fits. The network then says by what factor they differ
    /// from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<Line>,
    /// The scale of the network's output, the logarithm of nanoseconds or of that factor.
    pub answer: Number,
    /// The network.
    pub layers: Vec<Layer>,
}

/// How a number is scaled to become an input, and its range in the rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Number {
    /// Its name.
    pub name: String,
    /// The rows' mean.
    pub mean: f64,
    /// Their standard deviation; 0 for a number that never varied, which is not an input.
    pub scale: f64,
    /// The least value.
    pub low: f64,
    /// The greatest value.
    pub high: f64,
}

/// Errors on shapes that were kept out of training, as shares of the measured times. The roofline
/// answers for shapes that the model does not cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HeldOut {
    /// How many pairs of shape and load.
    pub rows: u64,
    /// How many of them the model covers.
    pub covered: u64,
    /// The median of the predictor's errors.
    pub median_error_per_mille: u64,
    /// The 90th percentile of the predictor's errors.
    pub p90_error_per_mille: u64,
    /// The median of the roofline's errors, where the table has the roofline's times.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub roofline_median_error_per_mille: Option<u64>,
    /// How well the logarithms of the times are predicted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fit: Option<Fit>,
}

/// How well predicted logarithms of times fit the measured ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Fit {
    /// The part of the variance that is explained (R²), in thousandths; below 0 where the mean
    /// would be a better answer.
    pub r2_per_mille: i64,
    /// The mean squared error of the natural logarithm, in millionths.
    pub mse_millionths: u64,
}

/// Why a predictor could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum PredictorError {
    /// The file could not be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// Not JSON, or a key is missing, unknown or of the wrong type.
    #[error("{}: {source}; `neap train` writes such files", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The JSON error, with line and column.
        source: serde_json::Error,
    },
    /// Another format or version, or a model that contradicts itself.
    #[error("{}: {problem}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The place in the file, and what must be there.
        problem: String,
    },
}

impl Number {
    /// Whether a value lies within the rows' range or close enough.
    fn covers(&self, value: f64) -> bool {
        if self.scale == 0.0 {
            (value - self.low).abs() < 1e-9
        } else {
            value >= self.low - BEYOND && value <= self.high + BEYOND
        }
    }

    fn possible(&self) -> bool {
        [self.mean, self.scale, self.low, self.high].iter().all(|x| x.is_finite())
            && self.scale >= 0.0
            && self.low <= self.high
    }
}

impl Model {
    /// The network's inputs; `None` when the model does not cover the operator.
    fn inputs(&self, features: &Features) -> Option<Vec<f64>> {
        let known = |word: &String| self.always.contains(word) || self.sometimes.contains(word);
        if !self.always.is_subset(&features.words) || !features.words.iter().all(known) {
            return None;
        }
        if features
            .numbers
            .keys()
            .any(|name| self.numbers.binary_search_by(|n| n.name.cmp(name)).is_err())
        {
            return None;
        }
        let mut inputs = Vec::with_capacity(self.numbers.len() + self.sometimes.len());
        for number in &self.numbers {
            let value = features.numbers.get(&number.name);
            if value.is_some_and(|&v| !number.covers(v)) {
                return None;
            }
            if number.scale > 0.0 {
                inputs.push(value.map_or(0.0, |v| (v - number.mean) / number.scale));
            }
        }
        inputs.extend(
            self.sometimes
                .iter()
                .map(|word| if features.words.contains(word) { 0.5 } else { -0.5 }),
        );
        Some(inputs)
    }

    /// The time of an operator with these features, if it is covered.
    #[must_use]
    pub fn predict(&self, features: &Features) -> Option<Nanos> {
        let scaled = network::answer(&self.layers, &self.inputs(features)?);
        let logarithm = scaled * self.answer.scale + self.answer.mean;
        let time = math::exp(
            logarithm.clamp(self.answer.low - 2.0 * BEYOND, self.answer.high + 2.0 * BEYOND),
        );
        let time = (time * self.line.map_or(1.0, |line| line.predict(features))).round();
        #[expect(clippy::cast_possible_truncation, reason = "a float saturates")]
        let time = time as u64;
        Some(Nanos(time.clamp(1, LONGEST.0)))
    }

    fn check(&self) -> Result<(), String> {
        let varying = self.numbers.iter().filter(|n| n.scale > 0.0).count();
        if !self.numbers.is_sorted_by(|a, b| a.name < b.name) {
            return Err("its `numbers` must be sorted by name, each name once".to_owned());
        }
        if let Some(number) = self.numbers.iter().chain([&self.answer]).find(|n| !n.possible()) {
            return Err(format!("the range or scale of `{}` is impossible", number.name));
        }
        if self.line.is_some_and(|line| !line.possible()) {
            return Err("its `line` must rise from 0 or more".to_owned());
        }
        network::check(&self.layers, varying + self.sometimes.len())
    }
}

impl Predictor {
    /// A predictor of these models.
    #[must_use]
    pub fn new(device: String, models: Vec<Model>) -> Self {
        Self { format: FORMAT.to_owned(), version: VERSION, device, models }
    }

    /// The model of a kind.
    #[must_use]
    pub fn model(&self, kind: &str) -> Option<&Model> {
        self.models.binary_search_by(|m| m.kind.as_str().cmp(kind)).ok().map(|at| &self.models[at])
    }

    /// The time of an operator while others keep the device busy for `load_percent`; `None` where
    /// no model covers it.
    #[must_use]
    pub fn predict(&self, operator: &Operator, load_percent: u32) -> Option<Nanos> {
        let model = self.model(&operator.kind)?;
        let (flops, bytes) = (roofline::flops(operator), roofline::bytes(operator));
        model.predict(&Features::new(&key(operator), flops, bytes, load_percent)?)
    }

    /// Reads a `*.predictor.json` file (plain or gzip).
    ///
    /// # Errors
    /// When the file can't be read or is not a valid predictor: which file, where in it, and what
    /// to do.
    pub fn read(path: &Path) -> Result<Self, PredictorError> {
        let invalid = |problem: String| PredictorError::Invalid { path: path.to_owned(), problem };
        let json = |source| PredictorError::Json { path: path.to_owned(), source };
        let content = files::read(path, LARGEST_FILE)?;
        let header: Header = serde_json::from_slice(&content).map_err(json)?;
        if header.format != FORMAT || header.version != VERSION {
            let found =
                format!("this is \"format\": {}, \"version\": {}", header.format, header.version);
            return Err(invalid(format!(
                "{found}; wanted is \"format\": \"{FORMAT}\", \"version\": {VERSION}"
            )));
        }
        let predictor: Self = serde_json::from_slice(&content).map_err(json)?;
        if !predictor.models.is_sorted_by(|a, b| a.kind < b.kind) {
            return Err(invalid(
                "`models` must be sorted by kind, each kind once; train it again".to_owned(),
            ));
        }
        for model in &predictor.models {
            model.check().map_err(|problem| {
                invalid(format!("the model of `{}`: {problem}; train it again", model.kind))
            })?;
        }
        Ok(predictor)
    }

    /// Writes a `*.predictor.json` file.
    ///
    /// # Errors
    /// When the file can't be written.
    pub fn write(&self, path: &Path) -> Result<(), PredictorError> {
        files::write(path, |out| {
            serde_json::to_writer(&mut *out, self)?;
            out.write_all(b"\n")
        })?;
        Ok(())
    }
}

/// The fields with which every neap file starts.
#[derive(Deserialize)]
struct Header {
    #[serde(default)]
    format: serde_json::Value,
    #[serde(default)]
    version: serde_json::Value,
}

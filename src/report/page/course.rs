//! Values over time in levels of detail, made while they arrive and in bounded memory.
//!
//! The finest level has a bounded number of stretches, each of the same number of instants. A full
//! level joins its stretches in pairs. Of a stretch of several instants the first, the last, the
//! lowest and highest sum of layers and the highest value of each line are kept, so that no level
//! hides a peak and every point that it has was there.

use serde::{Serialize, Serializer};

/// The most stretches of the finest level.
const FINEST: usize = 1 << 14;
/// The most stretches of the coarsest level: about one for each pixel column of a wide screen.
const COARSEST: usize = 1 << 11;
/// How many stretches of a level become one of the next coarser level.
const JOINED: usize = 8;

/// Values from a position on: those of each layer, and after them those of each line.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Moment {
    /// The position: nanoseconds, or the number of a request.
    at: u64,
    /// The values.
    values: Vec<u64>,
}

/// The highest value of a line or of the layers together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Peak {
    name: String,
    at: u64,
    value: u64,
}

/// Layers, which add up, and lines over time.
#[derive(Clone, Debug)]
pub struct Course {
    layers: Vec<String>,
    lines: Vec<String>,
    /// What the layers are together.
    sum: String,
    stretches: Vec<Vec<Moment>>,
    /// Instants of each stretch.
    stride: u64,
    /// Instants that were added.
    count: u64,
    end: u64,
    /// For the sum of layers and each line: its highest value, the other then, and its instant.
    peaks: Vec<Option<(u64, u64, u64)>>,
}

impl Default for Course {
    fn default() -> Self {
        Self::new("", &[], &[])
    }
}

impl Course {
    /// No values yet. `sum` names what the layers are together.
    #[must_use]
    pub fn new(sum: &str, layers: &[&str], lines: &[&str]) -> Self {
        let owned = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        Self {
            sum: sum.to_owned(),
            layers: owned(layers),
            lines: owned(lines),
            stretches: Vec::new(),
            stride: 1,
            count: 0,
            end: 0,
            peaks: vec![None; 1 + lines.len()],
        }
    }

    /// Curves that each have instants of their own, as lines. Between its instants a curve keeps
    /// its value.
    #[must_use]
    pub fn of_curves(curves: &[(&str, Vec<(u64, u64)>)]) -> Self {
        let names: Vec<&str> = curves.iter().map(|(name, _)| *name).collect();
        let mut course = Self::new("", &[], &names);
        let mut all: Vec<(u64, usize, u64)> = Vec::new();
        for (line, (_, points)) in curves.iter().enumerate() {
            all.extend(points.iter().map(|&(at, value)| (at, line, value)));
        }
        all.sort_by_key(|&(at, ..)| at);
        let mut values = vec![0; curves.len()];
        for together in all.chunk_by(|a, b| a.0 == b.0) {
            for &(_, line, value) in together {
                values[line] = value;
            }
            course.add(together[0].0, &values);
        }
        course
    }

    /// Adds the values from a position on, which is at least that of the call before.
    pub fn add(&mut self, at: u64, values: &[u64]) {
        let (layers, lines) = values.split_at(self.layers.len().min(values.len()));
        let sum = layers.iter().fold(0, |a: u64, &b| a.saturating_add(b));
        for (peak, value) in self.peaks.iter_mut().zip([&sum].into_iter().chain(lines)) {
            // Of several instants with the highest value the one with the highest sum.
            if peak.is_none_or(|(most, beside, _)| (most, beside) < (*value, sum)) {
                *peak = Some((*value, sum, at));
            }
        }
        if self.count.is_multiple_of(self.stride) && self.stretches.len() == FINEST {
            self.stretches = self.joined(&self.stretches, 2);
            self.stride *= 2;
        }
        let moment = Moment { at, values: values.to_vec() };
        if self.count.is_multiple_of(self.stride) {
            self.stretches.push(vec![moment]);
        } else if let Some(mut last) = self.stretches.pop() {
            last.push(moment);
            self.stretches.push(self.kept(last));
        }
        self.count += 1;
        self.end = at;
    }

    /// Says where the last values end, if that is beyond their own position.
    pub fn end_at(&mut self, end: u64) {
        self.end = self.end.max(end);
    }

    fn joined(&self, stretches: &[Vec<Moment>], by: usize) -> Vec<Vec<Moment>> {
        stretches.chunks(by).map(|some| self.kept(some.concat())).collect()
    }

    /// What is kept of a stretch, in order.
    fn kept(&self, moments: Vec<Moment>) -> Vec<Moment> {
        if moments.len() <= 2 {
            return moments;
        }
        let layers = self.layers.len();
        let sum = |i: &usize| {
            moments[*i].values[..layers].iter().fold(0, |a: u64, &b| a.saturating_add(b))
        };
        let all = || 0..moments.len();
        let mut keep = vec![0, moments.len() - 1];
        if layers > 0 {
            keep.extend(all().min_by_key(sum));
            keep.extend(all().rev().max_by_key(sum));
        }
        for line in layers..layers + self.lines.len() {
            keep.extend(all().rev().max_by_key(|i| moments[*i].values[line]));
            if layers == 0 {
                keep.extend(all().min_by_key(|i| moments[*i].values[line]));
            }
        }
        keep.sort_unstable();
        keep.dedup();
        let mut wanted = keep.into_iter().peekable();
        let kept = moments.into_iter().enumerate().filter(|(i, _)| wanted.next_if_eq(i).is_some());
        kept.map(|(_, moment)| moment).collect()
    }

    /// From coarse to fine.
    fn levels(&self) -> Vec<Vec<Moment>> {
        let mut all = vec![self.stretches.concat()];
        let mut level = self.stretches.clone();
        while level.len() > COARSEST {
            level = self.joined(&level, JOINED);
            all.push(level.concat());
        }
        all.reverse();
        all
    }
}

/// The levels as columns of differences to the value before, which are mostly short.
impl Serialize for Course {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Level {
            at: Vec<u64>,
            values: Vec<Vec<i64>>,
        }
        #[derive(Serialize)]
        struct Form<'a> {
            layers: &'a [String],
            lines: &'a [String],
            sum: &'a str,
            levels: Vec<Level>,
            /// Whether the finest level has every instant.
            whole: bool,
            end: u64,
            peaks: Vec<Peak>,
        }
        let columns = self.layers.len() + self.lines.len();
        let level = |moments: Vec<Moment>| {
            let mut before = 0;
            let step = |m: &Moment| m.at - std::mem::replace(&mut before, m.at);
            let at = moments.iter().map(step).collect();
            let column = |c: usize| {
                let mut before = 0u64;
                let value = |m: &Moment| m.values[c];
                let step = |v: u64| v.wrapping_sub(std::mem::replace(&mut before, v)) as i64;
                moments.iter().map(value).map(step).collect()
            };
            Level { at, values: (0..columns).map(column).collect() }
        };
        let names = std::iter::once(&self.sum).chain(&self.lines);
        let peak = |(name, found): (&String, &Option<_>)| {
            let (value, _, at) = (*found)?;
            (!name.is_empty()).then(|| Peak { name: name.clone(), at, value })
        };
        Form {
            layers: &self.layers,
            lines: &self.lines,
            sum: &self.sum,
            levels: self.levels().into_iter().map(level).collect(),
            whole: self.stride == 1,
            end: self.end,
            peaks: names.zip(&self.peaks).filter_map(peak).collect(),
        }
        .serialize(serializer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn few_instants_are_there_as_they_are() {
        let mut course = Course::new("allocated", &["a", "b"], &["reserved"]);
        course.add(0, &[1, 2, 9]);
        course.add(4, &[5, 2, 9]);
        course.add(4, &[0, 2, 9]);
        course.end_at(10);
        let wanted = json!({
            "layers": ["a", "b"], "lines": ["reserved"], "sum": "allocated", "whole": true, "end": 10,
            "levels": [{ "at": [0, 4, 0], "values": [[1, 4, -5], [2, 0, 0], [9, 0, 0]] }],
            "peaks": [
                { "name": "allocated", "at": 4, "value": 7 },
                { "name": "reserved", "at": 4, "value": 9 },
            ],
        });
        assert_eq!(serde_json::to_value(&course).unwrap(), wanted);
    }

    #[test]
    fn no_level_hides_a_peak_or_invents_one() {
        let count = 500_000;
        let layer = |t: u64| if t == 345_678 { 5_000 } else { t * 7_919 % 1_009 };
        let line = |t: u64| if t == 77_777 { 9_999 } else { t * 31 % 97 };
        let mut course = Course::new("all", &["layer"], &["line"]);
        (0..count).for_each(|t| course.add(t, &[layer(t), line(t)]));
        let levels = course.levels();
        assert!(levels.len() > 1);
        for level in &levels {
            assert!(level.is_sorted_by_key(|m| m.at));
            assert_eq!((level[0].at, level.last().unwrap().at), (0, count - 1));
            assert!(level.iter().all(|m| m.values == [layer(m.at), line(m.at)]));
            assert!(level.iter().any(|m| m.values[0] == 5_000));
            assert!(level.iter().any(|m| m.values[1] == 9_999));
        }
        let points: Vec<usize> = levels.iter().map(Vec::len).collect();
        assert!(points[0] <= 5 * COARSEST && points.is_sorted(), "{points:?}");
        assert!(*points.last().unwrap() <= 5 * FINEST, "{points:?}");
        assert_eq!(
            course.peaks,
            [Some((5_000, 5_000, 345_678)), Some((9_999, layer(77_777), 77_777))]
        );
    }

    #[test]
    fn curves_keep_their_value_between_their_own_instants() {
        let course =
            Course::of_curves(&[("a", vec![(0, 5), (6, 1)]), ("b", vec![(0, 2), (3, 8), (3, 4)])]);
        let found: Vec<_> = course.levels()[0].iter().map(|m| (m.at, m.values.clone())).collect();
        assert_eq!(found, [(0, vec![5, 2]), (3, vec![5, 4]), (6, vec![1, 4])]);
    }
}

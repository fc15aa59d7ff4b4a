//! The highest value of a relaxation by a proximal bundle method (Lemaréchal, 1978; Kiwiel, 1985).
//!
//! The value is concave and made of planes. Each point that is looked at gives one, which lies
//! above it everywhere. The next point is where the lowest plane so far is highest, less the square
//! of the way from the best point; the weights of planes that give it are found by moving weight
//! from the highest to the lowest plane there.

use super::{Memory, Relaxation};

/// The most planes that are kept.
const PLANES: usize = 100;

/// The most points that are looked at, and how many without a better one end the search.
const STEPS: u32 = 200;
const PATIENCE: u32 = 40;

/// Where planes promise no more than this part of the iteration's time, the step may only be too
/// short, and the next one goes farther. From the second number on, which weighs the square of the
/// way, the search ends there.
const HOPE: f64 = 1e-5;
const FAR: f64 = 100.0;

/// How often weights move between two planes to find one step.
const MOVES: usize = 100;

/// The best point that was found.
#[derive(Clone, Debug)]
pub(super) struct Found {
    /// Its value, as a part of the iteration's time.
    pub(super) value: f64,
    pub(super) point: Vec<f64>,
    /// The points whose planes gave the last step, with the weights of these.
    pub(super) planes: Vec<(f64, Vec<f64>)>,
}

/// A plane above the function.
struct Plane {
    rises: Vec<f64>,
    /// Its value at zero.
    base: f64,
    weight: f64,
    /// Where it touches the function.
    point: Vec<f64>,
}

impl Plane {
    fn at(&self, point: &[f64]) -> f64 {
        self.base + dot(&self.rises, point)
    }
}

/// In four sums, which a processor can make at once.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 4];
    let (a, b) = (a.chunks(4), b.chunks(4));
    for (a, b) in a.zip(b) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    (sums[0] + sums[1]) + (sums[2] + sums[3])
}

/// Moves a point to the nearest one at which prices are not negative, and those of an interval's
/// link at most 1 together.
fn admit(point: &mut [f64]) {
    let n = point.len() / 3;
    for price in point.iter_mut() {
        *price = price.max(0.0);
    }
    for at in n..2 * n {
        let over = (point[at] + point[at + n] - 1.0) / 2.0;
        if over > 0.0 {
            let (a, b) = (point[at] - over, point[at + n] - over);
            let (a, b) = if a < 0.0 {
                (0.0, 1.0)
            } else if b < 0.0 {
                (1.0, 0.0)
            } else {
                (a, b)
            };
            (point[at], point[at + n]) = (a, b);
        }
    }
}

/// The highest value found from a point on, and its point; the first one from `enough` on.
pub(super) fn rise(of: &Relaxation, start: Vec<f64>, enough: f64) -> Found {
    let mut memory = Memory::default();
    let mut center = start;
    let mut rises = vec![0.0; center.len()];
    let mut best = of.value(&center, &mut rises, &mut memory);
    let base = best - dot(&rises, &center);
    let mut planes = vec![Plane { rises: rises.clone(), base, weight: 1.0, point: center.clone() }];
    let mut reach = 0.05 / dot(&rises, &rises).sqrt().max(1e-9);
    let mut failed = 0;
    for _ in 0..STEPS {
        if best >= enough || failed >= PATIENCE {
            break;
        }
        let (point, model) = next(&mut planes, &center, reach, best);
        let value = of.value(&point, &mut rises, &mut memory);
        let plane = Plane {
            rises: rises.clone(),
            base: value - dot(&rises, &point),
            weight: 0.0,
            point: point.clone(),
        };
        let hoped = model - best;
        if hoped < HOPE && reach >= FAR {
            break;
        }
        if value > best && value - best >= hoped / 10.0 {
            if value - best >= hoped / 2.0 {
                reach *= 2.0;
            }
            (center, best, failed) = (point, value, 0);
        } else {
            failed += 1;
            if hoped < HOPE {
                reach *= 4.0;
            } else if failed % 10 == 0 {
                reach /= 2.0;
            }
        }
        if planes.len() >= PLANES {
            let idle = planes.iter().enumerate().filter(|(_, p)| p.weight <= 1e-12);
            let idle = idle.map(|(at, p)| (p.at(&center), at));
            if let Some((_, at)) = idle.max_by(|a, b| a.0.total_cmp(&b.0)) {
                planes.swap_remove(at);
            }
        }
        planes.push(plane);
    }
    let planes = planes.into_iter().filter(|plane| plane.weight > 0.0);
    let planes = planes.map(|plane| (plane.weight, plane.point)).collect();
    Found { value: best, point: center, planes }
}

/// The point at which the lowest plane is highest, less the square of the way to it; and that
/// plane's value there.
fn next(planes: &mut [Plane], center: &[f64], reach: f64, best: f64) -> (Vec<f64>, f64) {
    let mut sum = vec![0.0; center.len()];
    for plane in planes.iter().filter(|plane| plane.weight > 0.0) {
        for (sum, rise) in sum.iter_mut().zip(&plane.rises) {
            *sum += plane.weight * rise;
        }
    }
    let mut point = center.to_vec();
    let mut model = best;
    for _ in 0..MOVES {
        for ((point, center), sum) in point.iter_mut().zip(center).zip(&sum) {
            *point = center + reach * sum;
        }
        admit(&mut point);
        let (mut low, mut high) = ((f64::INFINITY, 0), (f64::NEG_INFINITY, 0));
        for (number, plane) in planes.iter().enumerate() {
            let value = plane.at(&point);
            if value < low.0 {
                low = (value, number);
            }
            if plane.weight > 0.0 && value > high.0 {
                high = (value, number);
            }
        }
        model = low.0;
        let ((low, to), (high, from)) = (low, high);
        if high - low <= 1e-3 * (low - best).abs().max(1e-7) {
            break;
        }
        let apart = |at: usize| planes[to].rises[at] - planes[from].rises[at];
        let square: f64 = (0..center.len()).map(|at| apart(at) * apart(at)).sum();
        let moved =
            ((high - low) / (reach * square).max(f64::MIN_POSITIVE)).min(planes[from].weight);
        for (at, sum) in sum.iter_mut().enumerate() {
            *sum += moved * apart(at);
        }
        planes[from].weight -= moved;
        planes[to].weight += moved;
    }
    (point, model)
}

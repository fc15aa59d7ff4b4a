//! Estimates against what jobs really took: `NEAP_TRUTH`, or `../shared/truth` where there is one.

use std::path::{Path, PathBuf};

use neap::estimate::answer::{Answer, answer};
use neap::estimate::forecast::{Forecast, Job};
use neap::estimate::gpu::{Class, Settings};
use neap::estimate::trace::Limits;
use neap::estimate::truth::{Truth, error_percent};
use neap::sim::allocator::Config;
use neap::sim::allocator::replay::replay;
use neap::sim::sequence::Sequence;

/// The truths' device, an H100.
const CLASS: Class = Class { capability: 9, multiprocessors: 132, threads: 2048 };

fn estimate(trace: &Path) -> Answer {
    let job = Job::read(trace, &Limits::default()).unwrap();
    let mut forecast =
        Forecast::new(&job, &Settings { class: CLASS, without: Vec::new(), cudnn_workspace: 0 });
    answer(&job, &mut forecast, &Config::default())
}

/// Prints, and gives, the middle of the errors' sizes.
fn median(name: &str, errors: &[f64]) -> f64 {
    let mut sizes: Vec<f64> = errors.iter().map(|e| e.abs()).collect();
    sizes.sort_by(f64::total_cmp);
    let middle = (sizes[(sizes.len() - 1) / 2] + sizes[sizes.len() / 2]) / 2.0;
    println!("{name}: median {middle:.2} %, worst {:.2} %", sizes[sizes.len() - 1]);
    middle
}

#[test]
fn estimates_are_near_the_truth_and_their_margin_is_enough() {
    let truth = std::env::var_os("NEAP_TRUTH").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/truth"),
        PathBuf::from,
    );
    let jobs = truth.join("jobs");
    let Ok(entries) = std::fs::read_dir(&jobs) else {
        println!("skipped: there is no {}", jobs.display());
        return;
    };
    let mut names: Vec<String> = entries
        .filter_map(|e| {
            e.unwrap()
                .file_name()
                .into_string()
                .unwrap()
                .strip_suffix(".profile.json.gz")
                .map(ToOwned::to_owned)
        })
        .collect();
    names.sort();
    assert!(!names.is_empty(), "no trace in {}", jobs.display());
    let (mut reserved, mut allocated) = (Vec::new(), Vec::new());
    for name in &names {
        let file = |end: &str| jobs.join(format!("{name}.{end}"));
        let answer = estimate(&file("profile.json.gz"));
        let truth = Truth::read(&file("truth.json")).unwrap();
        let errors = [
            error_percent(answer.stats.peak_reserved, truth.reserved),
            error_percent(answer.stats.peak_allocated, truth.allocated),
        ];
        println!("{name}: reserved {:+.2} %, allocated {:+.2} %", errors[0], errors[1]);
        assert!(
            errors[0].abs() <= 5.0
                && errors[1].abs() <= 4.0
                && errors[0] >= -2.0
                && errors[1] >= -2.0,
            "{name}: {errors:?}"
        );
        reserved.push(errors[0]);
        allocated.push(errors[1]);
        let (margin, peak) = (answer.margin().0, answer.stats.peak_reserved.0);
        assert!(margin * 20 <= peak, "{name}: a margin of {margin} on {peak}");
        let requests = Sequence::read(&file("truth.events.csv.gz")).unwrap().requests;
        let capped = replay(&requests, &Config::default(), answer.wanted(), None);
        assert_eq!(capped.first_oom, None, "{name} dies on its estimate and margin");
    }
    assert!(median("reserved", &reserved) <= 1.0);
    assert!(median("allocated", &allocated) <= 0.7);
}

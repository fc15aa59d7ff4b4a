//! Replays what a job asked PyTorch's caching allocator for, and finds the smallest device for it.
//!
//! ```sh
//! cargo run --example replay_snapshot
//! ```

use std::error::Error;
use std::path::Path;

use neap::sim::allocator::Config;
use neap::sim::allocator::replay::{LARGEST_DEVICE, replay, smallest_capacity};
use neap::sim::snapshot;

fn main() -> Result<(), Box<dyn Error>> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures/snapshots/tiny_cnn-adam-empty_cache.pickle.gz");
    let snapshot = snapshot::read(&file, None)?;
    for conf in ["", "expandable_segments:True"] {
        let config: Config = conf.parse()?;
        let report = replay(&snapshot.requests, &config, LARGEST_DEVICE, None);
        println!(
            "{:26} reserved {}, allocated {}",
            if conf.is_empty() { "default settings" } else { conf },
            report.stats.peak_reserved,
            report.stats.peak_allocated,
        );
        if let Some(least) = smallest_capacity(&snapshot.requests, &config, None) {
            println!("{:26} smallest device {}", "", least.capacity);
        }
    }
    Ok(())
}

//! Placement: problems that are known to fit, proofs that some do not, third parties' problems, and the command.

use std::path::{Path, PathBuf};
use std::process::Command;

use neap::plan::place::check::{Held, check};
use neap::plan::place::problem::Problem;
use neap::plan::place::search::{Options, Outcome, Technique, search};
use neap::plan::place::{self, Item, Layout, heuristic, load};
use proptest::prelude::*;

fn held(items: &[Item], layout: &Layout) -> Vec<Held> {
    let mut all = Vec::new();
    for (owner, (item, &offset)) in items.iter().zip(&layout.offsets).enumerate() {
        for &(from, until) in &item.spans {
            all.push(Held {
                owner,
                from: from.into(),
                until: until.into(),
                offset,
                size: item.bytes,
            });
        }
    }
    all
}

fn sound(items: &[Item], layout: &Layout) -> Result<(), TestCaseError> {
    prop_assert_eq!(layout.offsets.len(), items.len());
    prop_assert_eq!(check(&held(items, layout), layout.height), Ok(layout.height));
    for (item, offset) in items.iter().zip(&layout.offsets) {
        prop_assert!(offset.is_multiple_of(item.align) && item.fixed.is_none_or(|f| f == *offset));
    }
    Ok(())
}

/// Cuts a rectangle of time and bytes into items, straight through every time, so that they fit exactly.
fn cut(
    time: (u32, u32),
    bytes: (u64, u64),
    cuts: &mut impl Iterator<Item = (bool, u16)>,
    depth: u32,
    into: &mut Vec<(Item, u64)>,
) {
    let next = if depth == 0 { None } else { cuts.next() };
    match next {
        Some((true, at)) if time.1 - time.0 > 1 => {
            let at = time.0 + 1 + u32::from(at) % (time.1 - time.0 - 1);
            cut((time.0, at), bytes, cuts, depth - 1, into);
            cut((at, time.1), bytes, cuts, depth - 1, into);
        }
        Some((_, at)) if bytes.1 - bytes.0 > 1 => {
            let at = bytes.0 + 1 + u64::from(at) % (bytes.1 - bytes.0 - 1);
            cut(time, (bytes.0, at), cuts, depth - 1, into);
            cut(time, (at, bytes.1), cuts, depth - 1, into);
        }
        _ => into.push((Item::new(bytes.1 - bytes.0, vec![time]), bytes.0)),
    }
}

const PLENTY: u64 = 200_000_000;

fn options(without: &[Technique]) -> Options {
    Options { effort: PLENTY, without: without.to_vec() }
}

/// Whether any layout fits, by trying every offset for every item.
fn fits(items: &[Item], capacity: u64, placed: &mut Vec<u64>) -> bool {
    let Some(item) = items.get(placed.len()) else { return true };
    let meet =
        |a: &Item, b: &Item| a.spans.iter().any(|x| b.spans.iter().any(|y| x.0 < y.1 && y.0 < x.1));
    for offset in 0..=capacity.saturating_sub(item.bytes) {
        let given = item.fixed.is_none_or(|f| f == offset)
            && offset.is_multiple_of(item.align)
            && offset + item.bytes <= capacity;
        let free = placed.iter().zip(items).all(|(&o, other)| {
            !meet(item, other) || o + other.bytes <= offset || offset + item.bytes <= o
        });
        if given && free {
            placed.push(offset);
            if fits(items, capacity, placed) {
                return true;
            }
            placed.pop();
        }
    }
    false
}

fn small_items() -> impl Strategy<Value = Vec<Item>> {
    let span = (0u32..8, 1u32..5).prop_map(|(from, length)| (from, from + length));
    let second = proptest::option::weighted(0.2, (1u32..3, 1u32..4));
    let item = (1u64..5, span, second, 0u32..6).prop_map(|(bytes, span, second, align)| {
        let mut item = Item::new(bytes, vec![span]);
        item.spans.extend(second.map(|(gap, length)| (span.1 + gap, span.1 + gap + length)));
        item.align = if align == 0 { 2 } else { 1 };
        item
    });
    proptest::collection::vec(item, 1..8)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn what_was_cut_from_a_rectangle_goes_back_into_it(cuts in proptest::collection::vec(any::<(bool, u16)>(), 0..24), bytes in 1u64..64) {
        let mut pieces = Vec::new();
        cut((0, 24), (0, bytes), &mut cuts.into_iter(), 5, &mut pieces);
        let items: Vec<Item> = pieces.iter().map(|p| p.0.clone()).collect();
        prop_assert_eq!(load(&items), bytes);
        let (outcome, _) = search(&items, bytes, &options(&[]));
        let Outcome::Placed(layout) = outcome else { return Err(TestCaseError::fail(format!("{outcome:?}"))) };
        prop_assert!(layout.height <= bytes);
        sound(&items, &layout)?;
        let least = place::least(&items, &options(&[]));
        prop_assert_eq!((least.layout.height, least.bound), (bytes, bytes));
    }

    #[test]
    fn the_search_says_what_trying_everything_says(mut items in small_items(), capacity in 3u64..12, fixed in proptest::option::of(0u64..6), without in 0usize..20) {
        items[0].align = 1;
        items[0].fixed = fixed;
        let without: Vec<Technique> = Technique::ALL.get(without).map(|t| t.0).into_iter().collect();
        let want = fits(&items, capacity, &mut Vec::new());
        let (outcome, _) = search(&items, capacity, &options(&without));
        match outcome {
            Outcome::Placed(layout) => {
                prop_assert!(want && layout.height <= capacity);
                sound(&items, &layout)?;
            }
            Outcome::Impossible => prop_assert!(!want, "without {:?}", without),
            Outcome::GaveUp => return Err(TestCaseError::fail("gave up")),
        }
    }

    #[test]
    fn quick_layouts_are_sound_and_never_lower_than_the_search(items in small_items(), capacity in 0u64..20) {
        let quick = heuristic::place(&items, capacity);
        sound(&items, &quick)?;
        let placed = place::place(&items, capacity);
        sound(&items, &placed)?;
        let least = place::least(&items, &options(&[]));
        sound(&items, &least.layout)?;
        prop_assert!(load(&items) <= least.bound && least.bound <= least.layout.height);
        prop_assert!(least.layout.height <= quick.height && least.layout.height <= placed.height);
        prop_assert_eq!(least.bound, least.layout.height, "small problems are solved to the end");
    }
}

proptest! {
    // Each tries the exact search, which is slow without optimisation.
    #![proptest_config(ProptestConfig::with_cases(crate::common::cases(240) as u32))]

    #[test]
    fn many_items_are_placed_soundly(raw in proptest::collection::vec((1u64..4000, 0u32..300, 1u32..80), 1..300)) {
        let items: Vec<Item> = raw.iter().map(|&(bytes, from, length)| Item::new(bytes * 512, vec![(from, from + length)])).collect();
        let load = load(&items);
        for capacity in [0, load, load * 17 / 16, u64::MAX] {
            let layout = place::place(&items, capacity);
            prop_assert!(layout.height >= load);
            sound(&items, &layout)?;
        }
    }
}

fn truth() -> PathBuf {
    let root = std::env::var_os("NEAP_TRUTH").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/truth"),
        PathBuf::from,
    );
    root.join("minimalloc")
}

/// The benchmark problems of the `MiniMalloc` paper, where they are at hand. Without optimisation only those that take a moment.
#[test]
fn published_problems_fit() {
    let folder = truth();
    if !folder.is_dir() {
        println!("skipped: no {}", folder.display());
        return;
    }
    let names: &[&str] = if !crate::common::is_deep() {
        &["H", "J"]
    } else {
        &["A", "B", "C", "D", "E", "F", "G", "H", "I", "J", "K"]
    };
    for name in names {
        let problem = Problem::read(&folder.join(format!("{name}.1048576.csv")))
            .unwrap_or_else(|e| panic!("{e}"));
        let within = place::within(
            &problem.items(),
            1_048_576,
            &Options { effort: 10_000_000_000, without: Vec::new() },
        );
        println!("{name}: {:?}", within.spent);
        let Outcome::Placed(layout) = within.outcome else {
            panic!("{name}: {:?}", within.outcome)
        };
        assert_eq!(problem.check(&layout, 1_048_576), Ok(layout.height), "{name}");
    }
}

struct Run {
    code: Option<i32>,
    out: String,
    err: String,
}

fn neap(folder: &Path, args: &[&str]) -> Run {
    let output = Command::new(env!("CARGO_BIN_EXE_neap"))
        .args(args)
        .current_dir(folder)
        .output()
        .expect("runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Run { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
}

/// Four items that fit into 6.
const PROBLEM: &str = "id,lower,upper,size\na,0,4,2\nb,2,8,2\nc,6,9,4\nd,0,2,4\n";

#[test]
fn the_command_places_proves_and_refuses() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = folder.path();
    std::fs::write(at.join("p.csv"), PROBLEM).expect("written");
    let run = neap(at, &["place", "p.csv", "--capacity", "6", "-o", "o.csv", "--json"]);
    assert_eq!(run.code, Some(0), "{}", run.err);
    let object: serde_json::Value = serde_json::from_str(&run.out).expect("JSON");
    assert_eq!(
        (
            object["placed"].as_bool(),
            object["load_bytes"].as_u64(),
            object["height_bytes"].as_u64()
        ),
        (Some(true), Some(6), Some(6))
    );
    // What was written is a problem with every offset given.
    assert!(
        std::fs::read_to_string(at.join("o.csv"))
            .expect("written")
            .starts_with("id,lower,upper,size,offset\na,0,4,2,")
    );
    assert_eq!(neap(at, &["place", "o.csv", "--capacity", "6"]).code, Some(0));
    let least = neap(at, &["place", "p.csv"]);
    assert!(
        least.code == Some(0) && least.out.contains("nothing lower is possible"),
        "{}",
        least.out
    );

    let low = neap(at, &["place", "p.csv", "--capacity", "5", "-o", "none.csv"]);
    assert!(
        low.code == Some(1) && low.err.contains("from 0 on 6 are alive at once"),
        "{}",
        low.err
    );
    // Fits by size, but not in one piece: c above, e below, and nothing of 2 between.
    let split = "id,lower,upper,size,offset\na,0,4,1,1\nb,1,3,2,\n";
    std::fs::write(at.join("s.csv"), split).expect("written");
    let no = neap(at, &["place", "s.csv", "--capacity", "3", "-o", "none.csv"]);
    assert!(no.code == Some(1) && no.err.contains("tried every case"), "{}", no.err);
    let idle = neap(at, &["place", "s.csv", "--capacity", "3", "--effort", "0"]);
    assert!(idle.code == Some(1) && idle.err.contains("nor proved impossible"), "{}", idle.err);

    let bad = neap(at, &["place", "p.csv", "--without", "luck"]);
    assert!(bad.code == Some(2) && bad.err.contains("`luck` is not a technique"), "{}", bad.err);
    std::fs::write(at.join("b.csv"), format!("{PROBLEM}a,0,1,1\n")).expect("written");
    let twice = neap(at, &["place", "b.csv", "-o", "none.csv"]);
    assert!(
        twice.code == Some(2) && twice.err.contains("b.csv: line 6: the id `a` stands on line 2"),
        "{}",
        twice.err
    );
    let over = neap(at, &["place", "p.csv", "-o", "p.csv"]);
    assert!(over.code == Some(2) && over.err.contains("p.csv"), "{}", over.err);
    assert!(!at.join("none.csv").exists());
}

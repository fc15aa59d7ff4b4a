//! What a trace does not say, read from what follows.

use super::*;
use crate::allocator::replay::{LARGEST_DEVICE, observe};
use crate::allocator::{Allocator, Config};
use crate::requests::PRIVATE;

#[test]
fn empty_cache_is_told_from_a_retry() {
    let m = 2 << 20;
    let start = [
        ("segment_alloc", m, m),
        ("alloc", m, 5),
        ("free_requested", m, 5),
        ("free_completed", m, 5),
        ("segment_free", m, m),
    ];
    let (large, asked) = (20 << 20, 3 << 20);
    let again = [("segment_alloc", 9 * m, large), ("alloc", 9 * m, asked)];
    let sequence = |events: &[(&str, i64, i64)], segments: &[(i64, i64, &[Block])], stack| {
        let snapshot = parse(&recorded(events, segments, stack)).unwrap();
        (spell(&snapshot.requests), snapshot.expected_reserved.unwrap(), snapshot.limit.unwrap())
    };
    // Nothing follows: only empty_cache does that.
    assert_eq!(sequence(&start, &[], None).0, "a0:5 f0 e");
    // An allocation with a new segment follows: perhaps it was tried again on a device of 20 MiB; a
    // stack tells.
    let both = [&start[..], &again].concat();
    let blocks: &[Block] =
        &[(9 * m, asked, asked, "active_allocated"), (9 * m + asked, 0, large - asked, "inactive")];
    let standing: &[(i64, i64, &[Block])] = &[(9 * m, large, blocks)];
    let (small, large) = (m as u64, large as u64);
    for stack in [None, Some("empty_cache")] {
        let (requests, expected, limit) = sequence(&both, standing, stack);
        assert_eq!(requests, "a0:5 f0 e a1:3145728");
        assert_eq!(expected, [small, small, 0, large]);
        assert_eq!(limit.capacity, LARGEST_DEVICE);
    }
    let (requests, expected, limit) = sequence(&both, standing, Some("malloc"));
    assert_eq!((requests.as_str(), expected), ("a0:5 f0 a1:3145728", vec![small, small, large]));
    assert_eq!(limit.capacity, Bytes(large));
    // Were it as small as the block that went, that would have served it: then the cache was
    // emptied, whatever the stack says.
    let reuse = [&start[..], &[("segment_alloc", 9 * m, m), ("alloc", 9 * m, 5)]].concat();
    let blocks: &[Block] =
        &[(9 * m, 5, 512, "active_allocated"), (9 * m + 512, 0, m - 512, "inactive")];
    let standing: &[(i64, i64, &[Block])] = &[(9 * m, m, blocks)];
    assert_eq!(sequence(&reuse, standing, Some("malloc")).0, "a0:5 f0 e a1:5");
}

/// Item 8: a block that another stream still used completed while the allocation waited for that
/// stream, after it had looked for a block: it fails, and the next of its kind does not.
#[test]
fn a_failure_with_a_pending_free_fails_again() {
    let m = 1 << 20;
    let (a, b, c) = (m, 101 * m, 401 * m);
    let events = [
        ("segment_alloc", a, 200 * m),
        ("alloc", a, 100 * m),
        ("alloc", b, 100 * m),
        ("segment_alloc", c, 300 * m),
        ("alloc", c, 300 * m),
        ("free_requested", b, 100 * m),
        ("free_completed", b, 100 * m),
        ("oom", 4 * m, 100 * m),
        ("alloc", b, 100 * m),
    ];
    // The first two blocks are halves of a block that was freed before.
    let whole = [
        ("segment_alloc", a, 200 * m),
        ("alloc", a, 200 * m),
        ("free_requested", a, 200 * m),
        ("free_completed", a, 200 * m),
    ];
    let events = [&whole[..], &events[1..]].concat();
    let halves: &[Block] =
        &[(a, 100 * m, 100 * m, "active_allocated"), (b, 100 * m, 100 * m, "active_allocated")];
    let rest: &[Block] = &[(c, 300 * m, 300 * m, "active_allocated")];
    let bytes = recorded(&events, &[(a, 200 * m, halves), (c, 300 * m, rest)], None);
    let snapshot = parse(&bytes).unwrap();
    let (size, half) = (200 * m, 100 * m);
    let third = 300 * m;
    assert_eq!(
        spell(&snapshot.requests),
        format!("a0:{size} f0 a1:{half} a2:{half} a3:{third} a4:{half} f4 f2 a5:{half}")
    );
    assert_eq!(snapshot.failed, [4]);
    let limit = snapshot.limit.unwrap();
    assert_eq!(limit.capacity, Bytes(504 << 20));
    let mut served = Vec::new();
    let config = Config::default();
    observe(&snapshot.requests, &config, limit.capacity, None, |_, ok, _| {
        served.push(ok);
    });
    assert_eq!(served.iter().position(|ok| !ok), Some(5));
    assert_eq!(served.iter().filter(|ok| !**ok).count(), 1);
}

/// Item 8: private pools are kept apart where the file names them, and else it is said that
/// something took memory that the common pool had.
#[test]
fn private_pools_are_replayed_apart_or_said() {
    let m = 40 << 20;
    let (one, two) = (m, 9 * m);
    let events = [
        ("segment_alloc", one, m),
        ("alloc", one, m),
        ("free_requested", one, m),
        ("free_completed", one, m),
        ("segment_alloc", two, m),
        ("alloc", two, m),
    ];
    let idle: &[Block] = &[(one, 0, m, "inactive")];
    let used: &[Block] = &[(two, m, m, "active_allocated")];
    let mut bytes = recorded(&events, &[(one, m, idle), (two, m, used)], None);
    // The last segment's entry ends after its blocks; its pool is written before them.
    let at = bytes.windows(6).rposition(|w| w == b"blocks").unwrap() - 2;
    let pool = Pen::default().text("segment_pool_id").op(b"K\x00K\x01\x86").0;
    bytes.splice(at..at, pool);
    let apart = parse(&bytes).unwrap();
    assert_eq!(apart.expected_reserved, Some(vec![m as u64, m as u64, 2 * m as u64]));
    assert!(matches!(apart.requests[2], Request::Allocate { stream: PRIVATE, .. }));
    assert!(apart.limit.is_some() && apart.notes.iter().any(|n| n.contains("apart")));
    let mut held = Vec::new();
    let (config, most) = (Config::default(), Bytes(1 << 40));
    let emptied = [&apart.requests[..], &[Request::Free { id: 1 }, Request::EmptyCache]].concat();
    observe(&emptied, &config, most, None, |_, _, allocator| {
        held.push(allocator.stats().reserved.0);
    });
    // A private pool keeps its cached memory when the cache is emptied.
    let m = m as u64;
    assert_eq!(held, [m, m, 2 * m, 2 * m, m]);
    // The same in the events, as PyTorch 2.15 writes it: then the pool may be gone.
    let mut named = recorded(&events, &[(one, m as i64, idle), (two, m as i64, used)], None);
    let alloc = b"action\x8c\x05alloc";
    let at = named.windows(alloc.len()).rposition(|w| w == alloc).unwrap() - 2;
    named.splice(at..at, Pen::default().text("pool_id").op(b"K\x00K\x01\x86").0);
    let named = parse(&named).unwrap();
    assert_eq!(
        (named.requests, named.expected_reserved),
        (apart.requests, apart.expected_reserved)
    );
    // The same without the name, as when the pool is gone.
    let gone = parse(&recorded(&events, &[(one, m as i64, idle), (two, m as i64, used)], None));
    let gone = gone.unwrap();
    assert!(gone.limit.is_none());
    assert!(
        gone.notes.iter().any(|n| n.contains("Event 5 of the trace") && n.contains("private pool"))
    );
}

/// Item 8: recordings of random requests (tests/dry/requests.py, PyTorch 2.11), with
/// `empty_cache`, other streams, and a limit that the file does not name.
#[test]
fn what_emptied_the_cache_follows_from_the_rest() {
    for name in ["expandable", "max_split", "collected", "all"] {
        let path = fixture(&format!("random-{name}.pickle.gz"));
        let snapshot = read(&path, None).unwrap();
        let config = snapshot.settings.config().unwrap();
        let limit = snapshot.limit.unwrap_or_else(|| panic!("{name}: {:?}", snapshot.notes));
        let expected = snapshot.expected_reserved.unwrap();
        let fraction = Some(limit.fraction.unwrap_or(1.0));
        let look = |at: usize, ok: bool, allocator: &Allocator| {
            assert_eq!(allocator.stats().reserved.0, expected[at], "{name}: row {at}");
            if let Request::Allocate { id, .. } = snapshot.requests[at] {
                assert_eq!(ok, !snapshot.failed.contains(&id), "{name}: row {at}");
            }
        };
        let (all, capacity) = (&snapshot.requests, limit.capacity);
        observe(all, &config, capacity, fraction, look);
        assert!(snapshot.requests.contains(&Request::EmptyCache), "{name}");
        // Memory was short: something failed, or garbage collection kept it from that.
        assert!(!snapshot.failed.is_empty() || limit.fraction.is_some(), "{name}");
    }
}

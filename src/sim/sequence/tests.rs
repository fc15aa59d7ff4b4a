//! Event tables, well made and not.

use super::*;

fn table(text: &str) -> Reader {
    Reader::over(Path::new("x.csv"), Box::new(std::io::Cursor::new(text.as_bytes().to_vec())))
        .unwrap()
}

#[test]
fn ids_and_streams_are_made_small_and_columns_may_stand_anywhere() {
    let allocate = |id, bytes, stream| Request::Allocate { id, bytes: Bytes(bytes), stream };
    let wanted = [
        allocate(0, 5, 0),
        allocate(1, 6, 1),
        Request::Free { id: 0 },
        allocate(0, 7, 0),
        Request::EmptyCache,
        Request::Free { id: 1 },
        allocate(1, 8, 2),
    ];
    let plain = "op,id,bytes,stream\na,9,5,140\na,18446744073709551615,6,3\nf,9,,\na,2,7,140\ne,,,\n\nf,18446744073709551615\r\na,9,8,0";
    let odd = "\u{feff}extra,stream,op,bytes,id\n1,140,a,5,9\n,3,a,6,18446744073709551615\n,,f,,9\n,140,a,7,2\n,,e\n,,f,,18446744073709551615\n,0,a,8,9\n";
    for text in [plain, odd] {
        let mut reader = table(text);
        for request in wanted {
            assert_eq!(reader.request().unwrap(), Some(request), "{text}");
        }
        assert_eq!(reader.request().unwrap(), None);
    }
}

#[test]
fn a_block_that_failed_may_be_asked_for_again() {
    let mut reader = table(
        "op,id,bytes,stream,result\na,1,5,0,oom\na,1,4,0,ok\nf,1,,,ok\na,2,4,0,oom\nf,2,,,ok\n",
    );
    let ids = std::iter::from_fn(|| reader.request().unwrap());
    let ids: Vec<u32> = ids
        .map(|r| if let Request::Allocate { id, .. } | Request::Free { id } = r { id } else { 9 })
        .collect();
    assert_eq!(ids, [0, 0, 0, 0, 0]);
    assert_eq!((reader.expected().ok, reader.answered()), (Some(true), true));
}

#[test]
fn a_sequence_in_memory_reads_as_a_file_does() {
    let requests = vec![Request::EmptyCache, Request::Free { id: 3 }];
    let mut reader = Reader::new(
        Path::new("x"),
        Sequence { requests: requests.clone(), reserved: Some(vec![7, 9]), failed: vec![] },
    );
    assert!(reader.answered());
    for (request, reserved) in requests.into_iter().zip([7, 9]) {
        assert_eq!(reader.request().unwrap(), Some(request));
        assert_eq!(reader.expected().reserved, Some(reserved));
    }
    assert_eq!(reader.request().unwrap(), None);
}

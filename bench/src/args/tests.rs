//! Command lines that are read, and those that are refused.

use super::*;

#[test]
fn the_parser_is_sound() {
    Args::command().debug_assert();
}

#[test]
fn no_layer_means_all_and_a_name_means_one() {
    let names = |line: &str| match parse(line).unwrap().what() {
        What::List => vec!["list"],
        What::Page(_) => vec!["report"],
        What::Layers(layers) => layers.iter().map(|layer| layer.name).collect(),
    };
    assert_eq!(names("").len(), layer::ALL.len());
    assert_eq!(names("fifo"), ["fifo"]);
    assert_eq!(names("list"), ["list"]);
}

#[test]
fn lists_are_read_and_bad_values_refused() {
    let args = parse("fifo --depth 64,128 --producers 3 -n 10 -T 2 -c 0").unwrap();
    assert_eq!((args.depth(DEPTH), args.producers, args.iterations), (vec![64, 128], vec![3], Some(10)));
    for line in [
        "fifo --depth 65",
        "fifo --depth 32",
        "fifo --batch 128",
        "fifo -n 0",
        "fifo -T 0",
        "fifo -D 0",
        "fifo -D x",
        "put -b 12",
        "put -b 0",
        "put -b 64 -e 32",
        "put -e 512M",
        "put -f 1",
        "put -s 8 -e 64",
        "put -a -b 8",
        "put -i 8 -f 2",
        "fifo -s 8",
        "fifo result.json",
        "fifo -o page.html",
        "fifo --svg folder",
        "report",
        "report result.json -b 8",
        "report a.json result.json -o result.json",
        "fifo --tolerance 5",
        "fifo --baseline x --tolerance -1",
        "fifo --rate 0",
        "fifo --rate 5:1:1",
        "fifo --rate 1:5",
        "fifo --rate 0.001:1000:0.001",
        "fifo --rate NaN",
        "ipc --devices 0",
        "ipc --devices 0,x",
        "ipc --devices 0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0",
        "fifo --devices 0,0",
        "nothing",
    ] {
        assert!(parse(line).is_err(), "{line}");
    }
}

#[test]
fn sizes_go_from_the_smallest_to_the_largest() {
    let sizes = |line: &str| parse(line).unwrap().sizes();
    assert_eq!(sizes("put -b 8 -e 64 -f 2"), [8, 16, 32, 64]);
    assert_eq!(sizes("put -b 1K -e 6K -f 2"), [1024, 2048, 4096, 6144]);
    assert_eq!(sizes("put -b 2m -e 2M"), [2 << 20]);
    assert_eq!(sizes("put -b 8 -e 40 -i 16"), [8, 24, 40]);
    assert_eq!(sizes("put -s 1K"), [1024]);
    let all = sizes("put -a");
    assert_eq!((all.len(), all[0], all[20]), (21, 8, 8 << 20));
}

#[test]
fn a_test_has_its_own_sizes_unless_the_command_line_has_some() {
    let sizes = |line: &str| parse(line).unwrap().sizes_or(&[64, 128]);
    assert_eq!((sizes("ipc"), sizes("ipc -f 2")), (vec![64, 128], vec![64, 128]));
    assert_eq!((sizes("ipc -s 8"), sizes("ipc -b 1M")), (vec![8], vec![1 << 20]));
    assert_eq!(sizes("ipc -e 64"), [8, 64]);
}

#[test]
fn a_slow_test_has_fewer_runs() {
    assert_eq!(parse("fifo -N 3").unwrap().runs().count(), 3);
    let slow = parse("fifo -N 3 -D 0.0004").unwrap();
    let run = |_| std::thread::sleep(Duration::from_millis(25));
    assert_eq!(slow.runs().map(run).count(), 1);
}

#[test]
fn rates_go_by_steps() {
    let rates = |line: &str| parse(line).unwrap().rates_kops((1, 8, 1));
    assert_eq!(rates("fifo --rate 1:2:0.5"), [1000, 1500, 2000]);
    assert_eq!(rates("fifo --rate 0.25"), [250]);
    assert_eq!(rates("fifo").len(), 8);
}

#[test]
fn a_flag_that_nothing_reads_is_refused() {
    assert!(parse("ib --depth 64").is_err());
    assert!(parse("fifo -b 64").unwrap_err().to_string().contains("`fifo` does not use -b"));
    assert!(parse("list --drain 1").is_err());
    assert!(parse("--drain 1").is_ok());
    assert!(parse("ib -n 5").is_ok());
    assert!(parse("fifo --proxies 2").is_ok());
    assert_eq!(parse("ipc --devices 0,1,0").unwrap().gpus, [0, 1, 0]);
}

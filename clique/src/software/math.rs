//! What operations do to bytes.

use crate::backend::{DataType, ReduceOp};

/// Combines elements of `other` into `into`; false for a type that has no software implementation.
pub(super) fn combine(into: &mut [u8], other: &[u8], data_type: DataType, op: ReduceOp) -> bool {
    macro_rules! whole {
        ($type:ty) => {{
            elements(into, other, |a, b| {
                let (a, b) = (<$type>::from_le_bytes(a), <$type>::from_le_bytes(b));
                let result = match op {
                    ReduceOp::Sum => a.wrapping_add(b),
                    ReduceOp::Prod => a.wrapping_mul(b),
                    ReduceOp::Max => a.max(b),
                    ReduceOp::Min => a.min(b),
                };
                result.to_le_bytes()
            });
            true
        }};
    }
    macro_rules! float {
        ($type:ty) => {{
            elements(into, other, |a, b| {
                let (a, b) = (<$type>::from_le_bytes(a), <$type>::from_le_bytes(b));
                let result = match op {
                    ReduceOp::Sum => a + b,
                    ReduceOp::Prod => a * b,
                    ReduceOp::Max => a.max(b),
                    ReduceOp::Min => a.min(b),
                };
                result.to_le_bytes()
            });
            true
        }};
    }
    match data_type {
        DataType::I8 => whole!(i8),
        DataType::U8 => whole!(u8),
        DataType::I32 => whole!(i32),
        DataType::U32 => whole!(u32),
        DataType::I64 => whole!(i64),
        DataType::U64 => whole!(u64),
        DataType::F32 => float!(f32),
        DataType::F64 => float!(f64),
        DataType::F16 | DataType::BF16 => false,
    }
}

fn elements<const N: usize>(into: &mut [u8], other: &[u8], combine: impl Fn([u8; N], [u8; N]) -> [u8; N]) {
    for (a, b) in into.chunks_exact_mut(N).zip(other.chunks_exact(N)) {
        let (left, right) = (core::array::from_fn(|i| a[i]), core::array::from_fn(|i| b[i]));
        a.copy_from_slice(&combine(left, right));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn elements_are_combined_one_by_one() {
        let bytes = |values: [i32; 2]| values.map(i32::to_le_bytes).concat();
        for (op, expected) in [
            (ReduceOp::Sum, [1, 9]),
            (ReduceOp::Prod, [-6, 14]),
            (ReduceOp::Max, [3, 7]),
            (ReduceOp::Min, [-2, 2]),
        ] {
            let mut into = bytes([3, 2]);
            assert!(combine(&mut into, &bytes([-2, 7]), DataType::I32, op));
            assert_eq!(into, bytes(expected), "{op:?}");
        }
        let mut half = 1.5f32.to_le_bytes();
        assert!(combine(&mut half, &2.0f32.to_le_bytes(), DataType::F32, ReduceOp::Prod));
        assert_eq!(f32::from_le_bytes(half), 3.0);
        assert!(!combine(&mut [0; 2], &[0; 2], DataType::F16, ReduceOp::Sum));
    }
}

// Compression sends fewer bytes of floating-point tensors between the ranks, for fewer digits.
#pragma once

namespace sirtaki {

// Compression is the type in which an all-reduce of float32 or float64 tensors travels. Each rank's
// values, times `prescale`, are rounded to it once. They are added up in float32, divided if it is
// an average, and rounded once more. What arrives is multiplied by `postscale` in the tensor's own
// type. Every rank gets the same bits. Groups of tensors up to the option small_bytes are rounded
// alike but travel as float32: their time is not in the bytes. In a job of one rank nothing travels
// and nothing is rounded.
//
// Tensors of other types travel as they are: integers because they are exact, float16 and bfloat16
// because they are that small already.
//
//   F16   half the bytes of float32, 3 decimal digits, magnitudes of 6e-8 to 65504: larger values
//         become infinite. For values of moderate size, or with a prescale or a loss scale that
//         keeps them there.
//   BF16  half the bytes of float32, 2 decimal digits, the range of float32.
enum class Compression : unsigned char { None, F16, BF16 };

// CompressionScope says where tensors are compressed. BetweenHosts: only if the ranks of the job
// are on several hosts. The ranks of one host do not share a network, and what they exchange keeps
// its precision.
enum class CompressionScope : unsigned char { BetweenHosts, Everywhere };

}  // namespace sirtaki

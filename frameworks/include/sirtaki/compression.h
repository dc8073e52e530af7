// What floating-point tensors travel as: fewer bytes between the ranks for fewer digits.
#pragma once

namespace sirtaki {

// The type in which an all-reduce of float32 or float64 tensors travels. Each rank's values are
// rounded to it once, the ranks' values are added up in float32, and the result is rounded to it
// once more; every rank gets the same bits. Tensors of other types travel as they are: integers
// because they are exact, float16 and bfloat16 because they are as small already.
//
//   F16   half the bytes of float32, 3 decimal digits, magnitudes of 6e-8 to 65504: larger values
//         become infinite. With a loss scale (see GradScaler) or for values of moderate size.
//   BF16  half the bytes of float32, 2 decimal digits, the range of float32.
enum class Compression : unsigned char { None, F16, BF16 };

// Where it is used. BetweenHosts: only if the ranks of the job are on several hosts; the ranks of
// one host do not share a network, and what they exchange stays as precise as it is.
enum class CompressionScope : unsigned char { BetweenHosts, Everywhere };

}  // namespace sirtaki

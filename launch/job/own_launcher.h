// sirtakirun as a launcher of its own, where no MPI starts the ranks: it plays mpirun for the
// sirtakirun of the user, which does everything else as it does with an mpirun.
//
//   sirtakirun (Job)
//     sirtakirun --as-launcher                  starts the ranks of this machine
//       sirtakirun --as-rank
//       ssh b sirtakirun --as-daemon            starts those of another host
//         sirtakirun --as-rank
//
// Neither of the two ends ranks because others have failed: the user's sirtakirun does, over its
// connections to them, and a rank whose connection ends does so itself.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace sirtaki::launch {

// The number of the first rank that is started; default: 0.
inline constexpr std::string_view kFirstFlag = "--first";
inline constexpr std::string_view kDaemonFlag = "--as-daemon";

// The exit code of a launcher whose last line on standard error says why it has failed.
inline constexpr int kSaidWhy = 3;

// `words` are those that the plan has behind kLauncherFlag: flags, then what starts a rank. The exit
// code is 0 when all ranks have ended that have reached sirtakirun; 1 if one has not;
// kSaidWhy.
int RunAsLauncher(const std::vector<std::string>& words);

// `words`: first rank, count, size of the run. The order comes by standard input.
int RunAsDaemon(const std::vector<std::string>& words);

}  // namespace sirtaki::launch

// sirtakirun as it stands around a rank's program: gives it torchrun's variables, passes on what it
// prints, tells how it has ended, and ends it when the run ends.
#pragma once

#include <string>
#include <vector>

namespace sirtaki::launch {

// `program` and its arguments. The exit code: the program's, or 128 and its signal; 1 if it is not
// started, or the run has ended without it. Where sirtakirun itself is the launcher: 0 once the
// user's sirtakirun was reached, else 1.
int RunAsRank(const std::vector<std::string>& program);

}  // namespace sirtaki::launch

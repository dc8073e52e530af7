// Scripts that anyone can read, with what came of them: a scenario's commands, and below "----"
// what happened, until an empty line. They are written anew where SIRTAKI_TEST_WRITE_GOLDEN is set.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace sirtaki::tests {

// The names of the scripts in a folder of the project ("tests/core/protocol/golden"), in order.
std::vector<std::string> GoldenScripts(const std::string& folder);

// Plays a script and fails the test if anything else happens than is written. `command` carries out
// a line; `finish` gives what has happened since it was last asked, a line each.
void PlayGolden(const std::string& folder, const std::string& script,
                const std::function<void(const std::string& line)>& command,
                const std::function<std::string()>& finish);

}  // namespace sirtaki::tests

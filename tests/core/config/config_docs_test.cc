// docs/configuration.md is the table of options, as this test writes it.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

#include "core/base/environment.h"
#include "core/config/config.h"
#include "core/config/config_table.h"

namespace sirtaki::core {
namespace {

constexpr std::string_view kIntroduction = R"(# Configuration

<!-- Generated from the table of options in core/config/config_table.cc: change that, not this file.
     SIRTAKI_TEST_WRITE_DOCS=1 and the test ConfigDocsTest rewrite it. -->

An option can be given in five ways. The first one given counts:

1. by the program, by name, when it calls `init`;
2. by a flag, `--sirtaki-fusion-bytes=32M`. Other arguments, and all that follow a bare `--`, are left to
   the program;
3. by an environment variable, `SIRTAKI_FUSION_BYTES=32M`. One that is set to nothing counts as not set;
4. by the variable of Horovod's that means the same, where there is one;
5. by a file of `option: value` lines that the option [settings](#settings) names.

`init` refuses a value that is not allowed, a flag that is not known, and a `SIRTAKI_` variable that is not
known but near an option's name, as a misspelt one is: the error names it. Another `SIRTAKI_` variable that is
not known changes nothing, and rank 0 warns of it at `init`. Variables of the project itself cause neither:
`SIRTAKI_TEST_` ones of the tests, `SIRTAKI_BENCH_` ones of the benchmarks, `SIRTAKI_BOOTSTRAP_` ones,
`SIRTAKI_JOBS`, `SIRTAKI_PYTHON`, `SIRTAKI_CUDA`, `SIRTAKI_UNITY` and `SIRTAKI_MPIRUN_FLAGS` of the scripts,
`SIRTAKI_LAUNCH_` ones of sirtakirun, and `SIRTAKI_SECRET`, `SIRTAKI_SECRET_FILE` and `SIRTAKI_PORT`, by which ranks
[meet over TCP](tcp.md).

Sizes are in bytes or take `K`, `M` or `G`, powers of 1024. Times are in seconds or take `us`, `ms`, `s`
or `min`. Both may have decimals: `1.5G`, `0.5s`.

An *agreed* option is the same on all ranks: rank 0's value is taken everywhere, and `init` fails on every
rank if another rank was explicitly given a different value.

| option | default | agreed |
|---|---|---|
)";

std::string DefaultOf(const OptionSpec& option) { return OptionText(option, Config{}); }

std::string Code(std::string_view text) {
  return text.empty() ? "none" : "`" + std::string(text) + "`";
}

std::string Section(const OptionSpec& option) {
  std::string text = "\n## " + std::string(option.name) + "\n\n";
  text.append(option.help).append("\n\n");
  text += "- flag " + Code(option.Flag()) + ", variable " + Code(option.Variable());
  for (const HorovodAlias& alias : HorovodAliases()) {
    if (alias.option != option.name || alias.variable.empty()) continue;
    text += ", Horovod's " + Code(alias.variable);
  }
  text += "\n- default " + Code(DefaultOf(option));
  text += "; allowed is " + AllowedValues(option);
  text += option.agreed ? "\n- agreed by all ranks\n" : "\n- each rank's own\n";
  return text;
}

std::string PageOfTheTable() {
  std::string text(kIntroduction);
  for (const OptionSpec& option : OptionTable()) {
    text.append("| [").append(option.name).append("](#").append(option.name).append(") | ");
    text += Code(DefaultOf(option)) + " | " + (option.agreed ? "yes" : "no") + " |\n";
  }
  for (const OptionSpec& option : OptionTable()) text += Section(option);
  return text;
}

std::filesystem::path Page() {
#ifdef SIRTAKI_SOURCE_DIR
  const std::filesystem::path top = SIRTAKI_SOURCE_DIR;
#else
  // tests/core/config/config_docs_test.cc, however the compiler was told its name.
  const auto top = std::filesystem::absolute(__FILE__).parent_path().parent_path().parent_path();
#endif
  return top / "docs" / "configuration.md";
}

TEST(ConfigDocsTest, ThePageIsWhatTheTableSays) {
  const auto page = Page();
  if (EnvironmentView::OfProcess().Find("SIRTAKI_TEST_WRITE_DOCS") == "1") {
    std::ofstream(page, std::ios::binary) << PageOfTheTable();
  }
  std::ifstream file(page, std::ios::binary);
  ASSERT_TRUE(file.is_open()) << "no " << page;
  const std::string committed(std::istreambuf_iterator<char>(file), {});
  EXPECT_TRUE(committed == PageOfTheTable())
      << page
      << " differs from the table of options in core/config/config_table.cc.\nRewrite it by\n"
      << "  SIRTAKI_TEST_WRITE_DOCS=1 ctest --preset dev -R ConfigDocsTest\nand commit it.";
}

TEST(ConfigDocsTest, ThePageNamesEveryWayToGiveAnOption) {
  const std::string page = PageOfTheTable();
  for (const char* text :
       {"`--sirtaki-fusion-bytes`", "`SIRTAKI_FUSION_BYTES`", "`HOROVOD_FUSION_THRESHOLD`", "`64M`",
        "`HOROVOD_STALL_CHECK_DISABLE`"}) {
    EXPECT_NE(page.find(text), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace sirtaki::core

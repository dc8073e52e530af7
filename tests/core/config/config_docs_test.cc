#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "core/base/environment.h"
#include "core/config/config.h"

namespace sirtaki::core {
namespace {

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
    std::ofstream(page, std::ios::binary) << OptionsMarkdown();
  }
  std::ifstream file(page, std::ios::binary);
  ASSERT_TRUE(file.is_open()) << "no " << page;
  const std::string committed(std::istreambuf_iterator<char>(file), {});
  EXPECT_TRUE(committed == OptionsMarkdown())
      << page
      << " differs from the table of options in core/config/config_table.cc.\nRewrite it by\n"
      << "  SIRTAKI_TEST_WRITE_DOCS=1 ctest --preset dev -R ConfigDocsTest\nand commit it.";
}

TEST(ConfigDocsTest, ThePageNamesEveryWayToGiveAnOption) {
  const std::string page = OptionsMarkdown();
  for (const char* text :
       {"`--sirtaki-fusion-bytes`", "`SIRTAKI_FUSION_BYTES`", "`HOROVOD_FUSION_THRESHOLD`", "`64M`",
        "`HOROVOD_STALL_CHECK_DISABLE`"}) {
    EXPECT_NE(page.find(text), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace sirtaki::core

// Reading and scaling the images of train_resnet.
#include "images/image.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <string>
#include <vector>

#include "images/folder.h"

namespace examples {
namespace {

using ::testing::HasSubstr;

std::vector<std::uint8_t> Bytes(const std::string& text) { return {text.begin(), text.end()}; }

std::string WhyNot(const std::vector<std::uint8_t>& file,
                   Image (*decode)(const std::vector<std::uint8_t>&) = decode_ppm) {
  try {
    (void)decode(file);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing was thrown";
}

// What a colour's value is in the planes.
float Normal(float value, int colour) {
  constexpr float kMean[] = {0.485f, 0.456f, 0.406f};
  constexpr float kDeviation[] = {0.229f, 0.224f, 0.225f};
  return (value / 255 - kMean[colour]) / kDeviation[colour];
}

// Red grows by `across` to the right, green by `down` downwards, blue is 7.
Image Slope(int width, int height, int across, int down) {
  Image image = make_image(width, height);
  std::size_t at = 0;
  for (int y = 0; y < height; ++y) {
    for (int x = 0; x < width; ++x) {
      image.pixels[at++] = static_cast<std::uint8_t>(across * x);
      image.pixels[at++] = static_cast<std::uint8_t>(down * y);
      image.pixels[at++] = 7;
    }
  }
  return image;
}

TEST(ImagesTest, APpmIsReadWithItsComments) {
  const Image image = decode_ppm(Bytes("P6 # one\n2\n# two\n1\t127\nabcde\x7f"));
  EXPECT_EQ(image.width, 2);
  EXPECT_EQ(image.height, 1);
  EXPECT_THAT(image.pixels, ::testing::ElementsAre(97 * 255 / 127, 98 * 255 / 127, 99 * 255 / 127,
                                                   100 * 255 / 127, 101 * 255 / 127, 255));
}

TEST(ImagesTest, ABadPpmIsRefusedWithTheReason) {
  EXPECT_THAT(WhyNot(Bytes("P6")), HasSubstr("no width"));
  EXPECT_THAT(WhyNot(Bytes("P6 2 x")), HasSubstr("no height"));
  EXPECT_THAT(WhyNot(Bytes("P6 2 2 # 255")), HasSubstr("no brightest value"));
  EXPECT_THAT(WhyNot(Bytes("P6 2 2 65535\n")), HasSubstr("values up to 65535"));
  EXPECT_THAT(WhyNot(Bytes("P6 0 2 255\n")), HasSubstr("0 x 2 pixels"));
  EXPECT_THAT(WhyNot(Bytes("P6 9999999 9999999 255\nabc")), HasSubstr("is cut off"));
}

TEST(ImagesTest, AValueAboveTheBrightestIsThat) {
  EXPECT_THAT(decode_ppm(Bytes("P6 1 1 100 dc\xc8")).pixels, ::testing::ElementsAre(255, 252, 255));
}

// What a file may be called without being one.
TEST(ImagesTest, AFolderHasFilesOnly) {
  namespace fs = std::filesystem;
  const fs::path folder = fs::path(::testing::TempDir()) / ("images-" + std::to_string(getpid()));
  fs::create_directories(folder / "class" / "folder.jpg");
  std::ofstream(folder / "class" / "image.JPG");
  fs::create_symlink("image.JPG", folder / "class" / "link.png");
  fs::create_symlink("nowhere", folder / "class" / "broken.png");
  ASSERT_EQ(mkfifo((folder / "class" / "pipe.ppm").c_str(), 0600), 0);
  const ImageFolder images = list_images(folder.string());
  fs::remove_all(folder);
  ASSERT_EQ(images.files.size(), 2U);
  EXPECT_THAT(images.files[0].first, ::testing::EndsWith("/class/image.JPG"));
  EXPECT_THAT(images.files[1].first, ::testing::EndsWith("/class/link.png"));
}

// ---- JPEG ----

std::vector<std::uint8_t> Jpeg(std::initializer_list<std::vector<std::uint8_t>> segments) {
  std::vector<std::uint8_t> file = {0xff, 0xd8};
  for (const auto& segment : segments) file.insert(file.end(), segment.begin(), segment.end());
  return file;
}

// 64 x 64 grey pixels, of 2 bits for each block of 8 x 8, of which `bytes` are there; then `end`.
std::vector<std::uint8_t> GreyJpeg(std::size_t bytes, const std::vector<std::uint8_t>& end) {
  std::vector<std::uint8_t> scales = {0xff, 0xdb, 0, 67, 0};
  scales.resize(69, 1);
  // One code of one bit, which stands for 0.
  const auto codes = [](std::uint8_t table) {
    std::vector<std::uint8_t> segment = {0xff, 0xc4, 0, 20, table, 1};
    segment.resize(22, 0);
    return segment;
  };
  return Jpeg({scales,
               {0xff, 0xc0, 0, 11, 8, 0, 64, 0, 64, 1, 1, 0x11, 0},
               codes(0x00),
               codes(0x10),
               {0xff, 0xda, 0, 8, 1, 1, 0, 0, 63, 0},
               std::vector<std::uint8_t>(bytes, 0),
               end});
}

const std::vector<std::uint8_t> kEndOfImage = {0xff, 0xd9};

TEST(ImagesTest, ADamagedJpegIsReadAndOneThatIsCutOffIsNot) {
  if (!decodes_jpeg) GTEST_SKIP() << "built without libjpeg";
  for (const std::size_t bytes : {16, 4}) {  // 4: as after a damaged part
    const Image image = decode_jpeg(GreyJpeg(bytes, kEndOfImage));
    EXPECT_EQ(image.width, 64);
    EXPECT_THAT(image.pixels, ::testing::Each(128));
  }
  EXPECT_THAT(WhyNot(GreyJpeg(4, {}), decode_jpeg), HasSubstr("is a broken JPEG: Premature end"));
}

// The file has a few bytes, for which libjpeg would take 25 GB.
TEST(ImagesTest, AJpegOfTooManyPixelsIsRefusedByItsHeader) {
  if (!decodes_jpeg) GTEST_SKIP() << "built without libjpeg";
  const auto file =
      Jpeg({{0xff, 0xc2, 0, 17, 8, 0xff, 0xdc, 0xff, 0xdc, 3, 1, 0x11, 0, 2, 0x11, 0, 3, 0x11, 0},
            {0xff, 0xda, 0, 12, 3, 1, 0, 2, 0, 3, 0, 0, 0, 0},
            kEndOfImage});
  EXPECT_THAT(WhyNot(file, decode_jpeg), HasSubstr("has 65500 x 65500 pixels"));
}

TEST(ImagesTest, OfItsOwnSizeAnImageStaysAsItIs) {
  const Image image = Slope(5, 5, 40, 30);
  std::vector<float> planes(3 * 25);
  resample(image, {0, 0, 5, 5}, 5, false, planes.data());
  for (int y = 0; y < 5; ++y) {
    for (int x = 0; x < 5; ++x) {
      const auto at = static_cast<std::size_t>(5 * y + x);
      EXPECT_NEAR(planes[at], Normal(40.0f * x, 0), 1e-5);
      EXPECT_NEAR(planes[25 + at], Normal(30.0f * y, 1), 1e-5);
      EXPECT_NEAR(planes[50 + at], Normal(7, 2), 1e-5);
    }
  }
}

TEST(ImagesTest, AFlippedImageIsItsMirror) {
  const Image image = Slope(9, 7, 20, 30);
  std::vector<float> planes(3 * 16);
  std::vector<float> mirror(3 * 16);
  resample(image, {1.5, 0.5, 6, 5}, 4, false, planes.data());
  resample(image, {1.5, 0.5, 6, 5}, 4, true, mirror.data());
  for (std::size_t line = 0; line < 12; ++line) {
    for (std::size_t x = 0; x < 4; ++x) EXPECT_EQ(planes[4 * line + x], mirror[4 * line + 3 - x]);
  }
}

// Away from the edges a linear slope has at each point its own value there, however it is weighed,
// as long as the weights lie evenly about it.
TEST(ImagesTest, AnImageIsScaledWithoutBeingMoved) {
  const Image image = Slope(120, 120, 2, 1);
  constexpr int kSide = 10;
  std::vector<float> planes(3 * kSide * kSide);
  resample(image, {30, 40, 60, 40}, kSide, false, planes.data());
  for (int y = 0; y < kSide; ++y) {
    for (int x = 0; x < kSide; ++x) {
      const auto at = static_cast<std::size_t>(kSide * y + x);
      EXPECT_NEAR(planes[at], Normal(2 * (30 + 6 * (x + 0.5f) - 0.5f), 0), 0.01);
      EXPECT_NEAR(planes[kSide * kSide + at], Normal(40 + 4 * (y + 0.5f) - 0.5f, 1), 0.01);
    }
  }
}

TEST(ImagesTest, AFileIsNamedInItsError) {
  try {
    (void)read_image("no/such.jpg");
    FAIL() << "nothing was thrown";
  } catch (const std::exception& error) {
    EXPECT_THAT(error.what(), HasSubstr("no/such.jpg: cannot be opened: No such file"));
  }
}

}  // namespace
}  // namespace examples
